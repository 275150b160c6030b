"""BHyT and BHyT*: the formulas of arXiv 2601.09719, their gradients, and which numbers may move."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmstack.model import Llama, ModelConfig
from llmstack.model.norms.bhyt import BHyT, FirstBHyT, SecondBHyT
from llmstack.model.norms.bhyt_star import BHyTStar, BoundedTanh
from llmstack.model.norms.rmsnorm import RMSNorm

WIDTH, EPS = 32, 1e-6
Build = Callable[..., ModelConfig]


def sites(c_attn: float = 0.0, gains: bool = True, **options: Any) -> tuple[FirstBHyT, SecondBHyT]:
    """Both sites of one BHyT block in fp64, with random gains and the given c_attn."""
    config, method = ModelConfig(hidden_size=WIDTH, vocab_size=8), BHyT(**options)
    first, second = method.attention_norm(config, 0).double(), method.mlp_norm(config, 0).double()
    torch.manual_seed(1)
    with torch.no_grad():
        first.c_attn.fill_(c_attn)
        for site in (first, second) if gains else ():
            site.weight.normal_(1.0, 0.3)
    return first, second


def star(**options: Any) -> BoundedTanh:
    return BHyTStar(**options).mlp_norm(ModelConfig(hidden_size=WIDTH, vocab_size=8), 0).double()


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def test_small_lambda_is_scaled_rmsnorm() -> None:
    x = torch.rand(64, WIDTH, dtype=torch.float64) * 2 - 1
    expected = 1e-3 * x / (mean_square(x) + EPS).sqrt()
    first, _ = sites(gains=False, lambda_attention=0.01)
    for output in (first(x)[0], star(lambda_mlp=0.01)(x)):
        assert (output - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("mu_term", [False, True])
def test_bounded_by_gain(mu_term: bool) -> None:
    first, second = sites(lambda_attention=50.0, lambda_mlp=50.0, mu_term=mu_term)
    x = sample(64, WIDTH) * 100
    u, carry = first(x)
    assert (u.abs() <= first.weight.abs()).all()
    assert (second(x * 1000, carry).abs() <= second.weight.abs()).all()
    assert (u.abs() > 0.99 * first.weight.abs()).any()


@pytest.mark.parametrize("mu_term", [False, True])
def test_scale_invariance_holds_with_exact_statistics_only(mu_term: bool) -> None:
    first, second = sites(c_attn=50.0, mu_term=mu_term)
    exact, x, update = star(mu_term=mu_term), sample(8, WIDTH) * 10, sample(8, WIDTH, seed=1)
    (u, carry), (scaled_u, scaled_carry) = first(x), first(x * 30)
    torch.testing.assert_close(scaled_u, u, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(exact(x * 30), exact(x), rtol=1e-6, atol=1e-8)
    w, scaled_w = second(x + update, carry), second((x + update) * 30, scaled_carry)
    assert (w - scaled_w).abs().max() > 1e-3


def test_second_site_measures_nothing() -> None:
    first, second = sites(c_attn=0.0, lambda_mlp=1.5)
    x, grown = sample(8, WIDTH), sample(8, WIDTH, seed=1) * 5
    w = second(grown, first(x)[1])
    torch.testing.assert_close(
        w, second.weight * torch.tanh(0.15 * grown / (mean_square(x) + EPS).sqrt()), rtol=1e-7, atol=0
    )
    own_statistics = second.weight * torch.tanh(0.15 * grown / (mean_square(grown) + EPS).sqrt())
    assert (w - own_statistics).abs().max() > 0.1


def test_variance_of_second_site_is_corrected_by_first_lambda() -> None:
    first, second = sites(c_attn=3.0, lambda_attention=2.0, lambda_mlp=5.0, kappa=4.0)
    x, grown = sample(8, WIDTH) * 0.5, sample(8, WIDTH, seed=1)
    variance = mean_square(x) + 3.0 * (2.0 / 4.0) ** 2
    expected = second.weight * torch.tanh(5.0 / 4.0 * grown / (variance + EPS).sqrt())
    torch.testing.assert_close(second(grown, first(x)[1]), expected, rtol=1e-9, atol=0)


def test_mu_term_is_the_papers_form() -> None:
    first, second = sites(c_attn=3.0, lambda_attention=2.0, lambda_mlp=5.0, mu_term=True)
    x, grown = sample(8, WIDTH) + 0.7, sample(8, WIDTH, seed=1)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    u, carry = first(x)
    expected = first.weight * torch.tanh(2.0 * x / (10 * (variance + EPS).sqrt() + mean.abs()))
    torch.testing.assert_close(u, expected)
    torch.testing.assert_close(star(mu_term=True)(x), torch.tanh(x / (10 * (variance + EPS).sqrt() + mean.abs())))
    spread = (variance + 3.0 * 0.04 + EPS).sqrt()
    expected = second.weight * torch.tanh(5.0 * grown / (10 * spread + mean.abs()))
    torch.testing.assert_close(second(grown, carry), expected)


@pytest.mark.parametrize(("lam", "published"), [(1.0, 0.099), (2.0, 0.193), (3.0, 0.278)])
def test_output_rms_of_gaussian_input(lam: float, published: float) -> None:
    """sqrt(E tanh²(λz/κ)) over the normal density; the published numbers carry three digits."""
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-z.pow(2) / 2) / (2 * torch.pi) ** 0.5
    exact = torch.trapezoid(torch.tanh(lam / 10 * z).pow(2) * density, z).sqrt().item()
    norm = BHyTStar(lambda_mlp=lam).mlp_norm(ModelConfig(hidden_size=1024, vocab_size=8), 0)
    measured = norm(sample(256, 1024).float()).pow(2).mean().sqrt().item()
    assert measured == pytest.approx(exact, rel=1e-3)
    assert measured == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize("mu_term", [False, True])
def test_gradients_by_finite_differences(mu_term: bool) -> None:
    first, second = sites(c_attn=3.0, lambda_attention=2.0, lambda_mlp=3.0, mu_term=mu_term)

    def bounded(x: Tensor, lam: Tensor, gain: Tensor) -> Tensor:
        return torch.func.functional_call(first, {"lam": lam, "weight": gain}, (x,))[0]

    def second_site(x: Tensor, grown: Tensor, lam: Tensor, gain: Tensor) -> Tensor:
        return torch.func.functional_call(second, {"lam": lam, "weight": gain}, (grown, first(x)[1]))

    x, grown = sample(2, WIDTH).requires_grad_(), sample(2, WIDTH, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(bounded, (x, first.lam, first.weight))
    assert torch.autograd.gradcheck(second_site, (x, grown, second.lam, second.weight))


def test_no_gradient_through_the_correction() -> None:
    """λ1's gradient is that of a formula with the correction as a constant, and not the full derivative."""
    first, second = sites(c_attn=20.0, lambda_attention=2.0)
    x, output_weights = sample(4, WIDTH).requires_grad_(), sample(4, WIDTH, seed=2)

    def loss() -> Tensor:
        u, carry = first(x)
        return (second(x + u, carry) * output_weights).sum()

    def by_hand(correction: float) -> Tensor:
        u = first.weight * torch.tanh(first.lam / 10 * x / (mean_square(x) + EPS).sqrt())
        variance = mean_square(x) + correction + EPS
        w = second.weight * torch.tanh(second.lam / 10 * (x + u) / variance.sqrt())
        return (w * output_weights).sum()

    leaves = [first.lam, x]
    gradients = torch.autograd.grad(loss(), leaves)
    for ours, expected in zip(gradients, torch.autograd.grad(by_hand(20.0 * 0.04), leaves), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    assert not first.c_attn.requires_grad

    with torch.no_grad():
        step = 1e-5
        first.lam += step
        above = loss()
        first.lam -= 2 * step
        slope = (above - loss()) / (2 * step)
    assert abs(slope - gradients[0]) > 0.01 * abs(slope)


def test_first_variance_carries_gradient_to_the_second_site() -> None:
    first, second = sites(c_attn=1.0)
    x = sample(4, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(second(sample(4, WIDTH, seed=1), first(x)[1]).pow(2).sum(), x)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("method", ["bhyt", "bhyt_star"])
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("trainable", [False, True])
def test_lambda_moves_only_if_trainable(
    small: Build, method: str, optimiser: type[torch.optim.Optimizer], trainable: bool
) -> None:
    norm = {"method": method, "trainable_lambda": trainable, "lambda_final": 3.0}
    model = Llama(small(norm=norm)).requires_grad_(True)
    step = optimiser(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
    step.step()
    lambdas = [site.lam.item() for site in model.modules() if isinstance(site, BoundedTanh)]
    initial = [2.0, 1.0, 2.0, 1.0, 3.0]
    if trainable:
        assert all(now != before for now, before in zip(lambdas, initial, strict=True))
    else:
        assert lambdas == initial


@pytest.mark.parametrize("method", ["bhyt", "bhyt_star"])
def test_final_norm_rule(small: Build, method: str) -> None:
    plain = Llama(small(norm={"method": method})).norm
    assert isinstance(plain, RMSNorm)
    assert plain.eps == 1e-5
    bounded = Llama(small(norm={"method": method, "lambda_final": 3.0})).norm
    x = sample(4, WIDTH).float() * 7
    torch.testing.assert_close(bounded(x), torch.tanh(0.3 * x / (mean_square(x) + EPS).sqrt()))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_bf16_keeps_fp32_statistics(scale: float) -> None:
    """At most the rounding of the output: squares, their mean and the tanh are fp32."""
    site: nn.Module = star().bfloat16()
    x = (sample(64, WIDTH) * scale).bfloat16()
    assert torch.equal(site(x), star()(x.double()).float().bfloat16())
