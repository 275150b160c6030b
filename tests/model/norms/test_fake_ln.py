"""FakeLN: norms that are replaced by a frozen average of their scale, site by site."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmstack.errors import UserError
from llmstack.inference import Generator
from llmstack.model import Llama, ModelConfig
from llmstack.model.norms.fake_ln import FakeLN, FakeLNBeforeAttention, FakeLNMethod
from tests.model.norms.living import live

Build = Callable[..., ModelConfig]
WIDTH, EPS = 24, 1e-5
SHORT = {"method": "fake_ln", "start_mlp": 2, "start_qk": 6, "start_v": 9, "start_final": 13}


def site_of(kind: type[FakeLN], centred: bool = True) -> FakeLN:
    torch.manual_seed(0)
    site = kind(WIDTH, EPS, centred)
    with torch.no_grad():
        for parameter in site.parameters():
            parameter.normal_(1, 0.5)
    return site


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 + 0.3


@pytest.mark.parametrize("centred", [True, False])
def test_before_its_turn_it_is_the_norm(centred: bool) -> None:
    site, x = site_of(FakeLN, centred).double(), tokens(2, 5)
    if centred:
        assert site.bias is not None
        expected = F.layer_norm(x, (WIDTH,), site.weight, site.bias, EPS)
    else:
        expected = F.rms_norm(x, (WIDTH,), site.weight, EPS)
    torch.testing.assert_close(site(x), expected)
    first = site_of(FakeLNBeforeAttention, centred).double()
    (qk, v), carry = first(x)
    assert carry is None
    torch.testing.assert_close(qk, v, rtol=0, atol=0)


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("centred", [True, False])
def test_after_it_is_linear_with_the_average_for_a_scale(centred: bool, is_linear: bool) -> None:
    """γ ⊙ (x − mean)/s̄ + β; with the mean left in, without its form."""
    site, x = site_of(FakeLN, centred).double(), tokens(2, 5)
    site.frozen_scale.scale.fill_(1.6)
    site.frozen_scale.first_scale.fill_(1.6)
    site.is_linear = is_linear
    centre = x - x.mean(-1, keepdim=True) if centred else x
    expected = site.weight * centre / site.frozen_scale.scale.double()
    torch.testing.assert_close(site(x), expected if site.bias is None else expected + site.bias)


def test_queries_and_keys_have_another_scale_than_values() -> None:
    site, x = site_of(FakeLNBeforeAttention).double(), tokens(2, 5)
    whole = site(x)[0][0]
    site.frozen_scale.scale.fill_(2.0)
    site.frozen_scale.first_scale.fill_(2.0)
    (qk, v), _ = site(x)
    torch.testing.assert_close(v, whole)
    torch.testing.assert_close((qk - site.bias) * 2, site.weight * (x - x.mean(-1, keepdim=True)))


def test_the_first_token_may_have_a_scale_of_its_own() -> None:
    site, x = site_of(FakeLN).double(), tokens(2, 5)
    site.frozen_scale.scale.fill_(2.0)
    site.frozen_scale.first_scale.fill_(8.0)
    centred = site.weight * (x - x.mean(-1, keepdim=True))
    torch.testing.assert_close(site(x)[:, 0], centred[:, 0] / 8 + site.bias)
    torch.testing.assert_close(site(x)[:, 1:], centred[:, 1:] / 2 + site.bias)


def test_gradients_by_finite_differences() -> None:
    site = site_of(FakeLNBeforeAttention).double()
    site.frozen_scale.scale.fill_(1.5)
    site.frozen_scale.first_scale.fill_(3.0)
    x = tokens(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: site(inputs[0])[0], (x, *site.parameters()))


def test_the_published_order_of_gpt2_small() -> None:
    """MLP norms from 20, Q and K from 44, V from 68, the final norm at 104; one layer each 2, 2 and 3 steps."""
    switches = FakeLNMethod().switches(12)
    assert [switches["mlp", layer] for layer in (0, 1, 11)] == [20, 22, 42]
    assert [switches["qk", layer] for layer in (0, 1, 11)] == [44, 46, 66]
    assert [switches["v", layer] for layer in (0, 1, 11)] == [68, 71, 101]
    assert switches["final", 12] == 104


@pytest.mark.parametrize(
    "options", [{"start_mlp": 0}, {"gap_v": 0}, {"scale_average_decay": 1.0}, {"scale_loss": float("inf")}]
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="norm fake_ln"):
        FakeLNMethod(**options)


def test_a_merge_before_the_last_switch_is_refused(small: Build) -> None:
    with pytest.raises(UserError, match="start_merge is 13; the last site of this model is switched after step 13"):
        Llama(small(norm={**SHORT, "first_token": True, "start_merge": 13}))


@pytest.mark.parametrize("first_token", [False, True])
def test_a_life(small: Build, first_token: bool) -> None:
    """Each site is switched after its step and never moves again; at the end nothing is measured any more."""
    torch.manual_seed(0)
    model = Llama(small(norm={**SHORT, "first_token": first_token, "start_merge": 15}))
    method = model.config.norm_method
    assert isinstance(method, FakeLNMethod)
    due = {scale: step for _, scales in method.sites(model).values() for scale, step in scales.items()}
    assert sorted(due.values()) == [2, 4, 6, 8, 9, 12, 13]
    frozen: dict[object, Tensor] = {}
    for step in live(model, 18):
        for scale, switch in due.items():
            assert (scale.scale > 0) == (step >= switch)
            if step == switch:
                frozen[scale] = scale.scale.clone()
                assert torch.equal(scale.first_scale, scale.scale) == (not first_token)
            elif step > switch:
                assert torch.equal(scale.scale, frozen[scale])
        ends = 15 if first_token else 13
        assert {site.is_linear for site, _ in method.sites(model).values()} == {step >= ends}
        assert bool(method.observed(model, step + 1, 18)) == (step < 13)
    assert all(torch.equal(scale.first_scale, scale.scale) for scale in due)


def test_a_first_token_apart_is_not_decoded(small: Build) -> None:
    """One token after the other none is known to be the first."""
    model = Llama(small(norm={**SHORT, "first_token": True, "start_merge": 15}))
    for step in live(model, 15):
        if step in (1, 15):
            Generator(model, 8)
        else:
            with pytest.raises(UserError, match="start_merge"):
                Generator(model, 8)
        model.train()


def test_the_average_is_that_of_the_steps_before_the_switch(small: Build) -> None:
    """Bias-corrected, of the mean over all tokens of sqrt(var + ε), from forward passes of the training."""
    torch.manual_seed(0)
    model = Llama(small(norm={**SHORT, "scale_average_decay": 0.8}))
    site = model.blocks[1].mlp_norm
    seen: list[float] = []

    def look(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training:
            seen.append(float((inputs[0].detach().double().var(-1, unbiased=False) + EPS).sqrt().mean()))

    site.register_forward_pre_hook(look)
    for _ in live(model, 6):
        pass
    total = sum(0.2 * 0.8 ** (3 - index) * value for index, value in enumerate(seen[:4]))
    assert float(site.frozen_scale.scale) == pytest.approx(total / (1 - 0.8**4), rel=1e-5)
