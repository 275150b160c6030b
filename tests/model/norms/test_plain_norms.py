"""RMSNorm and LayerNorm against torch's own, and their gradients against finite differences."""

import pytest
import torch
from torch import Tensor, nn

from llmstack.model.norms.layernorm import LayerNorm
from llmstack.model.norms.rmsnorm import RMSNorm

PAIRS = [(RMSNorm, nn.RMSNorm), (LayerNorm, nn.LayerNorm)]


def filled(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return norm


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_equals_torch_in_fp32(ours: type[nn.Module], torchs: type[nn.Module], scale: float) -> None:
    x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(0)) * scale + scale / 2
    expected = filled(torchs(64, eps=1e-5))(x)
    torch.testing.assert_close(filled(ours(64, eps=1e-5))(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-2, 1e3])
def test_layernorm_keeps_fp32_statistics_in_bf16(scale: float) -> None:
    norm, reference = filled(LayerNorm(64, eps=1e-5)), filled(nn.LayerNorm(64, eps=1e-5))
    x = (torch.randn(32, 64) * scale).bfloat16()
    expected = reference.bfloat16().float()(x.float()).bfloat16()
    assert torch.equal(norm.bfloat16()(x), expected)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_gradients_by_finite_differences(kind: type[nn.Module]) -> None:
    norm = filled(kind(6, eps=1e-5)).double()
    names, weights = zip(*norm.named_parameters(), strict=True)

    def apply(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(apply, (x, *weights))


def test_rmsnorm_formula() -> None:
    x = torch.tensor([[3.0, -4.0]])
    torch.testing.assert_close(RMSNorm(2, eps=0.5)(x), x / (12.5 + 0.5) ** 0.5)
