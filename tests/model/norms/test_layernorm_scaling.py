"""LNS (arXiv 2502.05795): RMSNorm over sqrt(l), and nothing else changed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmstack.model import Llama, ModelConfig
from llmstack.model.norms.lns import ScaledRMSNorm
from llmstack.model.norms.rmsnorm import RMSNorm

Build = Callable[..., ModelConfig]


def lns(small: Build, layers: int = 9) -> Llama:
    torch.manual_seed(0)
    model = Llama(small(norm={"method": "lns"}, num_layers=layers))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.3)
    return model


def test_block_l_divides_by_sqrt_l_at_both_sites(small: Build) -> None:
    x = torch.randn(4, 32, dtype=torch.float64) * 3
    for number, block in enumerate(lns(small).double().blocks, start=1):
        for site, output in (
            (block.attention_norm, block.attention_norm(x)[0]),
            (block.mlp_norm, block.mlp_norm(x, None)),
        ):
            expected = site.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() / number**0.5
            torch.testing.assert_close(output, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_one_is_rmsnorm_to_the_last_bit(dtype: torch.dtype) -> None:
    ours, plain = ScaledRMSNorm(64, 1e-5, number=1), RMSNorm(64, 1e-5)
    assert ours.scale.item() == 1.0
    with torch.no_grad():
        ours.weight.normal_()
        plain.weight.copy_(ours.weight)
    x = torch.randn(50, 64).to(dtype)
    assert torch.equal(ours.to(dtype)(x), plain.to(dtype)(x))


def test_final_norm_and_stream_are_plain(small: Build) -> None:
    model, x = lns(small, layers=4), torch.randn(2, 5, 32)
    assert type(model.norm) is RMSNorm
    block = model.blocks[3]
    y = x + block.attention(block.attention_norm(x)[0], None)
    torch.testing.assert_close(block(x), y + block.mlp(block.mlp_norm(y)))


def test_factor_is_a_derived_tensor(small: Build) -> None:
    """Not saved, not trained; as many graphs as RMSNorm has (see test_block_kinds)."""
    model = lns(small)
    assert not [name for name in model.state_dict() if name.endswith("scale")]
    scales = [block.mlp_norm.scale for block in model.to(torch.bfloat16).blocks]
    assert all(isinstance(scale, Tensor) and scale.dtype == torch.float32 for scale in scales)
    assert [scale.item() for scale in scales] == pytest.approx([n**-0.5 for n in range(1, 10)], rel=1e-7)


def test_gradients_by_finite_differences() -> None:
    norm = ScaledRMSNorm(6, 1e-5, number=3).double()

    def apply(x: Tensor, gain: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": gain}, (x,))

    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(apply, (x, norm.weight))


def test_bf16_rounds_the_output_alone() -> None:
    norm = ScaledRMSNorm(64, 1e-5, number=7)
    x = (torch.randn(50, 64) * 100).bfloat16()
    assert torch.equal(norm.bfloat16()(x), ScaledRMSNorm(64, 1e-5, number=7)(x.float()).bfloat16())
