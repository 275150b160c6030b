"""TaperNorm and TaperLN: what the gate, the calibration and the branches are, by their formulas."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.norms.rmsnorm import RMSNorm
from llmstack.model.norms.scale_anchor import decay_before
from llmstack.model.norms.taper import TaperedSite
from llmstack.model.norms.taperln import AllTaperLN, InternalTaperLN, TaperLN
from llmstack.model.norms.tapernorm import AllTaper, InternalTaper, TaperNorm
from tests.model.norms.living import live

Build = Callable[..., ModelConfig]
WIDTH, EPS = 24, 1e-5
both = pytest.mark.parametrize("kind", [TaperNorm, TaperLN])


def site_of(kind: type[TaperedSite]) -> TaperedSite:
    """With gains and biases that a training may have left."""
    torch.manual_seed(0)
    site = kind(WIDTH, EPS)
    with torch.no_grad():
        for parameter in site.norm_parameters():
            parameter.normal_(1, 0.5)
    return site


def tokens(*shape: int) -> Tensor:
    """Of different norms, with a mean that is not zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, WIDTH, generator=generator)
    return (x + 0.3) * torch.rand(*shape, 1, generator=generator).add(0.5) * 3


@torch.no_grad()
def calibrate(site: TaperedSite, *batches: Tensor) -> None:
    for x in batches:
        sums = site.calibration_sums(x)
        site.calibration.update(sums[:2] / sums[2], decay=0.9)
    site.freeze()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_open_gate_is_rmsnorm_bit_for_bit(dtype: torch.dtype) -> None:
    site, plain = site_of(TaperNorm).to(dtype), RMSNorm(WIDTH, EPS).to(dtype)
    plain.load_state_dict({"weight": site.weight})
    x = tokens(3, 5).to(dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = site(ours), plain(theirs)
    assert torch.equal(y, expected)
    for output in (y, expected):
        output.backward(torch.ones_like(output))
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(site.weight.grad, plain.weight.grad)
    assert torch.equal(site.offset.grad, torch.zeros(WIDTH, dtype=dtype))


def test_an_open_gate_is_layernorm() -> None:
    site, x = site_of(TaperLN), tokens(3, 5)
    assert torch.equal(site(x), F.layer_norm(x, (WIDTH,), site.weight, site.bias, EPS))


@both
def test_c_is_the_least_squares_fit_of_the_linear_map_to_the_norm(kind: type[TaperedSite]) -> None:
    site, x = site_of(kind), tokens(20, 7).double()
    calibrate(site, x)
    shift = site.bias.double() if isinstance(site, TaperLN) else 0

    def distance(c: float) -> float:
        with torch.no_grad():
            return float((site.norm(x) - shift - (site.linear(x) - shift) * c / site.c.double()).pow(2).sum())

    c = float(site.c)
    assert distance(c) < min(distance(c * 1.01), distance(c * 0.99))
    # The minimum of a parabola through three points lies at c.
    low, middle, high = distance(0.9 * c), distance(c), distance(1.1 * c)
    assert (low - high) / (2 * (low - 2 * middle + high)) * 0.1 == pytest.approx(0, abs=1e-5)


def test_c_times_the_scale_is_about_one() -> None:
    """Exactly, where all tokens have the same."""
    site, x = site_of(TaperNorm), tokens(50, 7)
    equal = x / x.pow(2).mean(-1, keepdim=True).sqrt() * 2.5
    calibrate(site, equal)
    assert float(site.c) * math.sqrt(2.5**2 + EPS) == pytest.approx(1, rel=1e-6)
    site.calibration.reset_parameters()
    calibrate(site, x)
    assert float(site.c) * float(x.pow(2).mean(-1).sqrt().mean()) == pytest.approx(1, rel=0.2)


def test_the_averages_are_those_of_the_steps_with_their_bias_corrected() -> None:
    site, batches = site_of(TaperNorm), [tokens(4, 3) * scale for scale in (1, 2, 5)]
    calibrate(site, *batches)
    fits = torch.zeros(2, dtype=torch.float64)
    for x in batches:
        energy = (site.weight.detach() * x).double().pow(2).sum(-1)
        scale = (x.double().pow(2).mean(-1) + EPS).sqrt()
        fits = 0.9 * fits + 0.1 * torch.stack([(energy / scale).mean(), energy.mean()])
    torch.testing.assert_close(site.calibration.value, fits / (1 - 0.9**3), rtol=1e-5, atol=0)
    assert float(site.c) == pytest.approx(float(fits[0] / fits[1]), rel=1e-5)


@both
def test_a_closed_gate_is_linear(kind: type[TaperedSite]) -> None:
    """f(a·h1 + h2) = a·f(h1) + f(h2), the bias aside; statistics and γ have no part in it."""
    site = site_of(kind)
    calibrate(site, tokens(4, 3))
    with torch.no_grad():
        site.offset.normal_(0, 0.1)
    site.set_gate(0.0)
    one, other = tokens(2, 3).double(), torch.flip(tokens(2, 3), (0, 1)).double()
    shift = site(torch.zeros(1, 1, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(site(3 * one + other) - shift, 3 * (site(one) - shift) + site(other) - shift)
    site(one).sum().backward()
    for parameter in site.norm_parameters():
        assert torch.equal(parameter.grad, torch.zeros(WIDTH))
    assert all(parameter.grad.any() for parameter in site.linear_parameters())


@both
@pytest.mark.parametrize("gate", [0.75, 0.2])
def test_between_them_it_is_the_mixture(kind: type[TaperedSite], gate: float) -> None:
    site, x = site_of(kind), tokens(2, 3).double()
    calibrate(site, tokens(4, 3))
    site.set_gate(gate)
    centred = x - x.mean(-1, keepdim=True) if kind is TaperLN else x
    normed = site.weight.double() * centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    linear = site.c.double() * site.weight.double() * centred
    shift = site.bias.double() if isinstance(site, TaperLN) else 0
    expected = float(site.gate) * normed + (1 - float(site.gate)) * linear + shift
    torch.testing.assert_close(site(x), expected)


def test_gradients_by_finite_differences_in_every_phase() -> None:
    site = site_of(TaperLN).double()
    calibrate(site, tokens(4, 3).double())
    x = tokens(1, 2).double().requires_grad_()
    for gate in (1.0, 0.4, 0.0):
        site.set_gate(gate)
        assert torch.autograd.gradcheck(lambda *inputs: site(inputs[0]), (x, *site.parameters()))


def test_the_gate_follows_a_cosine() -> None:
    method = InternalTaper(taper_start=0.1, taper_end=0.5)
    assert method.schedule(100) == (10, 50)
    assert [method.gate(step, 100) for step in (1, 10, 50, 51, 100)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert method.gate(30, 100) == pytest.approx(0.5)
    assert method.gate(20, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    gates = [method.gate(step, 100) for step in range(1, 101)]
    assert gates == sorted(gates, reverse=True)


@pytest.mark.parametrize(
    "options",
    [{"taper_start": 0}, {"taper_start": 0.5, "taper_end": 0.5}, {"taper_end": 1.1}, {"scale_loss": -1.0}],
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="norm tapernorm_all"):
        AllTaper(**options)
    with pytest.raises(UserError, match="norm taperln_all: calibration_decay"):
        AllTaperLN(calibration_decay=1.0)


@pytest.mark.parametrize("method", ["tapernorm_internal", "tapernorm_all", "taperln_internal", "taperln_all"])
def test_a_life(small: Build, method: str) -> None:
    """Ten steps with the taper from the second to the sixth: what changes when, and from what the linear map starts."""
    torch.manual_seed(0)
    model = Llama(small(norm={"method": method, "taper_start": 0.2, "taper_end": 0.6}))
    sites = model.config.norm_method.sites(model)
    assert len(sites) == 5 if method.endswith("all") else 4
    assert ("norm" in sites) == method.endswith("all")
    phases, gains = [], {}
    for step in live(model, 10):
        phases.append({site.phase for site in sites.values()})
        assert all(site.offset.any() == (step > 2) for site in sites.values()), step
        assert all((site.c > 0) == (step >= 2) for site in sites.values()), step
        if step == 2:
            gains = {name: site.weight.clone() for name, site in sites.items()}
        if step >= 2:
            assert all(torch.equal(site.origin, gains[name]) for name, site in sites.items())
    # After step k stands what step k + 1 computes with.
    assert phases == [{"norm"}, {"taper"}, {"taper"}, {"taper"}, {"linear"}, *[{"linear"}] * 5]
    assert {float(site.calibration.weight) for site in sites.values()} == {1.0}


def test_averages_forget_in_a_tenth_of_the_steps_before_and_in_a_hundred_at_most() -> None:
    """10 of 100 steps is a decay of 0.9; with 1000 and more it is 0.99; of ten steps the last alone counts."""
    assert [decay_before(step) for step in (1, 10, 100, 1000, 100_000)] == [0.0, 0.0, 0.9, 0.99, 0.99]


@pytest.mark.parametrize("length", [1, 9])
def test_the_model_at_the_closed_gate_scales_with_its_embedding(small: Build, length: int) -> None:
    """All-Taper has no norm left: without attention's softmax nothing would keep the scale. With the gate open, all."""
    torch.manual_seed(0)
    model = Llama(small(norm={"method": "tapernorm_all"}, mlp="relu"))
    for site in model.config.norm_method.sites(model).values():
        site.c.fill_(1.0)
        site.origin.fill_(1.0)
    ids = torch.arange(length)[None]
    for gate, scales in ((1.0, False), (0.0, length == 1)):
        for site in model.config.norm_method.sites(model).values():
            site.set_gate(gate)
        before = model(ids)
        with torch.no_grad():
            model.embed_tokens.weight.mul_(2)
            after = F.linear(model.hidden_states(ids), model.lm_head.weight / 2)
            model.embed_tokens.weight.div_(2)
        if scales:  # one token attends to itself alone: every sub-layer is homogeneous
            torch.testing.assert_close(after, 2 * before)
        elif gate == 1.0:
            assert (after - before).abs().max() < 1.9 * before.abs().max()


def test_only_the_methods_whose_norms_they_are_can_be_taken_over() -> None:
    assert InternalTaper().takes_over == {"rmsnorm"}
    assert AllTaperLN().takes_over == InternalTaperLN().takes_over == {"layernorm"}


class TestScaleLoss:
    """The loss that keeps the scale where no final norm does."""

    def anchored(self, small: Build, **options: object) -> Llama:
        torch.manual_seed(0)
        return Llama(small(norm={"method": "tapernorm_all", "taper_start": 0.3, "taper_end": 0.5, **options}))

    def test_its_gradient_is_the_formula(self, small: Build) -> None:
        """2λ(s − s_tgt)·h/(d·s) for each token, over their number."""
        anchor = self.anchored(small, scale_loss=0.25).scale_anchor
        anchor.target.fill_(1.7)
        h = tokens(2, 5)
        h.requires_grad_()
        anchor(h).backward()
        s = (h.detach().pow(2).mean(-1, keepdim=True) + EPS).sqrt()
        expected = 2 * 0.25 * (s - 1.7) * h.detach() / (WIDTH * s) / 10
        torch.testing.assert_close(h.grad, expected)

    @pytest.mark.parametrize("method", ["tapernorm_all", "taperln_all"])
    def test_the_target_is_the_mean_scale_before_the_taper(self, small: Build, method: str) -> None:
        torch.manual_seed(0)
        norm = {"method": method, "taper_start": 0.3, "taper_end": 0.5, "scale_decay": 0.9}
        model = Llama(small(norm=norm))
        expected, weight = 0.0, 0.0
        states: list[bool] = []

        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal expected, weight
            if module.training or len(states) >= 3:
                return
            h = inputs[0].double()
            h = h - h.mean(-1, keepdim=True) if method == "taperln_all" else h
            expected = 0.9 * expected + 0.1 * float((h.pow(2).mean(-1) + EPS).sqrt().mean())
            weight = 0.9 * weight + 0.1

        model.norm.register_forward_pre_hook(look)
        for _ in live(model, 10):
            states.append(model.scale_anchor.active)
        assert states == [False, False, *[True] * 8]
        assert float(model.scale_anchor.target) == pytest.approx(expected / weight, rel=1e-5)

    def test_weight_zero_is_no_anchor(self, small: Build) -> None:
        assert self.anchored(small, scale_loss=0.0).scale_anchor is None

    def test_a_final_norm_feels_no_radial_gradient_and_an_unanchored_head_a_negative_one(self, small: Build) -> None:
        """d/ds loss(s·h) at s = 1: (ε/r²)⟨∇ℓ, y⟩ with RMSNorm; below zero without, wherever the right token leads."""
        model = self.anchored(small).double()
        norm, h = model.norm, torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).double() * 0.05
        norm.c.fill_(1.0)
        norm.origin.fill_(1.0)

        def losses(scale: float, labels: Tensor) -> Tensor:
            return F.cross_entropy(model.lm_head(norm((scale * h)[None]))[0].double(), labels, reduction="none")

        for gate in (1.0, 0.0):
            norm.set_gate(gate)
            with torch.no_grad():
                labels = model.lm_head(norm(h[None]))[0].argmax(-1)
                slope = (losses(1 + 1e-4, labels) - losses(1 - 1e-4, labels)) / 2e-4
            if gate == 0.0:
                assert (slope < 0).all()
                continue
            y = norm(h[None])[0].detach().requires_grad_()
            F.cross_entropy(model.lm_head(y[None])[0].double(), labels, reduction="sum").backward()
            ratio = EPS / (h.pow(2).mean(-1) + EPS)
            torch.testing.assert_close(slope, ratio * (y.grad * y.detach()).sum(-1), rtol=1e-4, atol=1e-9)
