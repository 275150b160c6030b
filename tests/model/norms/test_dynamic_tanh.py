"""DyT (arXiv 2503.10622): the formula, α0 by width, the embedding scale, and what is decayed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.norms.dyt import DynamicTanh, DyT, EmbeddingScale, FirstDyT, initial_alphas

Build = Callable[..., ModelConfig]


def site(width: int = 16, alpha: float = 0.7, bias: bool = False) -> DyT:
    torch.manual_seed(0)
    module = DyT(width, alpha, bias).double()
    with torch.no_grad():
        module.weight.normal_(1.0, 0.3)
        if module.bias is not None:
            module.bias.normal_()
    return module


@pytest.mark.parametrize("bias", [False, True])
def test_formula(bias: bool) -> None:
    module, x = site(bias=bias), torch.randn(3, 5, 16, dtype=torch.float64) * 4
    expected = module.weight * torch.tanh(0.7 * x)
    if bias:
        expected = expected + module.bias
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=0)
    assert (module.bias is not None) == bias


def test_no_statistics() -> None:
    """An element of the output depends on the same element of the input, and on no other."""
    module, x = site(), torch.randn(16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(module, x)
    assert torch.equal(jacobian, torch.diag(jacobian.diagonal()))
    assert (jacobian.diagonal() != 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_by_finite_differences(bias: bool) -> None:
    module = site(width=6, bias=bias)
    names, weights = zip(*module.named_parameters(), strict=True)

    def apply(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(apply, (x, *weights))


def test_gradient_of_alpha_is_one_number() -> None:
    """dL/dα = Σ γ·x·(1 − tanh²(αx)), over all tokens and channels."""
    module, x = site(), torch.randn(3, 5, 16, dtype=torch.float64)
    module(x).sum().backward()
    assert module.alpha.grad is not None
    assert module.alpha.grad.numel() == 1
    slope = module.weight * x * (1 - torch.tanh(0.7 * x).pow(2))
    torch.testing.assert_close(module.alpha.grad, slope.sum()[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_bf16_keeps_an_fp32_tanh(scale: float) -> None:
    module = DyT(64, 0.5, bias=False)
    x = (torch.randn(50, 64) * scale).bfloat16()
    assert torch.equal(module.bfloat16()(x), torch.tanh(0.5 * x.float()).bfloat16())


@pytest.mark.parametrize(
    ("width", "attention", "other"),
    [
        (1024, 1.0, 1.0),
        (2048, 1.0, 0.5),
        (4096, 0.8, 0.2),
        (5120, 0.6, 0.15),
        (8192, 0.2, 0.05),
        (128, 1.0, 1.0),
        (16384, 0.2, 0.05),
    ],
)
def test_alpha_by_width(width: int, attention: float, other: float) -> None:
    assert initial_alphas(width) == (attention, other)


def test_alpha_between_the_published_widths() -> None:
    assert [round(alpha, 1) for alpha in initial_alphas(3072)] == [0.9, 0.3]
    alphas = [initial_alphas(width) for width in range(512, 9000, 64)]
    for place in range(2):
        values = [alpha[place] for alpha in alphas]
        assert values == sorted(values, reverse=True)


def test_alpha_differs_between_attention_and_the_rest() -> None:
    config = ModelConfig(vocab_size=8, hidden_size=2048, num_layers=3, intermediate_size=16, norm={"method": "dyt"})
    with torch.device("meta"):
        meta = Llama(config)
    sites = [module for module in meta.modules() if isinstance(module, DyT)]
    initial = [(isinstance(module, FirstDyT), module.initial_alpha) for module in sites]
    assert initial == [(True, 1.0), (False, 0.5)] * 3 + [(False, 0.5)]


def test_configured_alphas_and_every_norm_replaced(small: Build) -> None:
    model = Llama(small(norm={"method": "dyt", "alpha_attention": 0.6, "alpha_other": 0.15, "bias": True}))
    for block in model.blocks:
        assert (block.attention_norm.alpha.item(), block.mlp_norm.alpha.item()) == pytest.approx((0.6, 0.15))
    assert isinstance(model.norm, DyT)
    assert model.norm.alpha.item() == pytest.approx(0.15)
    for block in model.blocks:
        assert torch.equal(block.mlp_norm.weight, torch.ones(32))
        assert torch.equal(block.mlp_norm.bias, torch.zeros(32))


@pytest.mark.parametrize("option", ["alpha_attention", "alpha_other"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_alpha_is_named(option: str, value: float) -> None:
    with pytest.raises(UserError, match=option):
        DynamicTanh(**{option: value})


def test_embedding_is_scaled_by_a_trained_number(small: Build) -> None:
    model, ids = Llama(small(norm={"method": "dyt"})), torch.arange(6)[None]
    expected = model.embed_tokens.weight[ids] * 32**0.5
    torch.testing.assert_close(model._embed(ids, ids), expected)
    model._embed(ids, ids).sum().backward()
    gradient = dict(model.named_parameters())["after_embedding.scale"].grad
    torch.testing.assert_close(gradient, model.embed_tokens.weight[ids].sum()[None])


def test_embedding_scale_in_bf16_rounds_the_output_alone() -> None:
    scale, x = EmbeddingScale(2048), torch.randn(50, 2048).bfloat16()
    assert torch.equal(scale(x), (x.float() * 2048**0.5).bfloat16())


def test_everything_is_decayed_as_published(small: Build) -> None:
    for options, everything in (({}, True), ({"decay_everything": False}, False)):
        config = small(norm={"method": "dyt", **options}, lm_head_bias=True)
        for name, parameter in Llama(config).named_parameters():
            decayed = config.norm_method.decayed(config, name, parameter)
            assert decayed == (everything or parameter.ndim == 2), name
