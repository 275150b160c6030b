"""Methods by layer: what a range means, who decides what, and BHyT's own choices by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.llama import Block, PostNormBlock
from llmstack.model.norms import METHODS
from llmstack.model.norms.bhyt import FirstBHyT, SecondBHyT
from llmstack.model.norms.bhyt_star import BoundedTanh, FirstBoundedTanh
from llmstack.model.norms.dyt import EmbeddingScale, FirstDyT
from llmstack.model.norms.layer_ranges import select_layers
from llmstack.model.norms.lns import FirstScaledRMSNorm
from llmstack.model.norms.rmsnorm import FirstRMSNorm, RMSNorm
from tests.model.norms.living import live

Build = Callable[..., ModelConfig]


def build(small: Build, norm: dict[str, Any], layers: int = 6, **options: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(small(norm=norm, num_layers=layers, **options))


def mixture(layers: dict[str, Any], otherwise: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"method": "by_layer", "layers": layers, "otherwise": otherwise, **options}


# Ranges


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0-3", {0, 1, 2, 3}),
        ("7", {7}),
        (7, {7}),
        ("5-", {5, 6, 7}),
        ("0-7", set(range(8))),
        ("0,3-4, 6-", {0, 3, 4, 6, 7}),
        ("2-2", {2}),
    ],
)
def test_ranges(text: str | int, layers: set[int]) -> None:
    assert select_layers(text, 8, "here") == layers


@pytest.mark.parametrize("text", ["", "a", "-3", -3, "3-1", "0-8", "8", "8-", "1,,2", "1.5", "0 3"])
def test_bad_range_is_named(text: str | int) -> None:
    with pytest.raises(UserError, match="here") as refusal:
        select_layers(text, 8, "here")
    assert "\n" not in str(refusal.value)


# by_layer


@pytest.mark.parametrize("method", sorted(METHODS))
def test_one_range_over_everything_is_the_method_itself(small: Build, method: str) -> None:
    """Weights, initialisation, embedding, final norm and all: bit for bit."""
    plain, ids = build(small, {"method": method}), torch.randint(67, (2, 9))
    for norm in (mixture({"0-": {"method": method}}), mixture({}, otherwise={"method": method})):
        mixed = build(small, norm)
        assert mixed.state_dict().keys() == plain.state_dict().keys()
        assert torch.equal(mixed(ids), plain(ids))


def test_each_layer_has_its_own_method(small: Build) -> None:
    layers = {"0": {"method": "dyt"}, "1-2": {"method": "post_ln"}, "4-": {"method": "bhyt", "lambda_attention": 3.0}}
    model = build(small, mixture(layers, otherwise={"method": "lns"}))
    first = [type(block.attention_norm) for block in model.blocks]
    assert first == [FirstDyT, RMSNorm, RMSNorm, FirstScaledRMSNorm, FirstBHyT, FirstBHyT]
    assert [type(block) for block in model.blocks] == [Block, *[PostNormBlock] * 2, *[Block] * 3]
    assert model.blocks[3].attention_norm.scale.item() == pytest.approx(4**-0.5)  # the number of the block in the model
    assert model.blocks[5].attention_norm.lam.item() == 3.0
    assert isinstance(model.after_embedding, EmbeddingScale)  # of the first block's method
    assert type(model.norm) is RMSNorm  # of the last block's, BHyT with λ_last = 0


def test_initialisation_and_decay_follow_the_layer(small: Build) -> None:
    layers = {"0-1": {"method": "dyt"}, "2-3": {"method": "deep_norm"}}
    config = small(norm=mixture(layers), num_layers=6, hidden_size=128, intermediate_size=256)
    method = config.norm_method
    torch.manual_seed(0)
    for name, parameter in Llama(config).named_parameters():
        top, *inner = name.split(".")
        of_dyt = top in ("embed_tokens", "after_embedding") or (top == "layers" and int(inner[0]) < 2)
        assert method.decayed(config, name, parameter) == (of_dyt or parameter.ndim == 2), name
        if parameter.ndim == 2:
            deep = top == "layers" and int(inner[0]) in (2, 3) and name.endswith("up_proj.weight")
            if deep or name.endswith(("up_proj.weight", "embed_tokens.weight")):
                expected = 48**-0.25 * (2 / (128 + 256)) ** 0.5 if deep else 0.02
                assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def c_attn(model: Llama) -> list[float | None]:
    sites = [block.attention_norm for block in model.blocks]
    return [site.c_attn.item() if isinstance(site, FirstBHyT) else None for site in sites]


def test_life_in_training_reaches_own_blocks_only(small: Build) -> None:
    """Two BHyT parts of different training length: each refreshes its own c_attn, with its own T."""
    layers = {"1-2": {"method": "bhyt", "train_length": 64}, "4-": {"method": "bhyt"}}
    model = build(small, mixture(layers, train_length=256))
    plain = c_attn(build(small, {"method": "bhyt", "train_length": 64}))
    expected = [None, plain[1], plain[2], None, *(value / 4 for value in plain[4:])]
    assert c_attn(model) == [None if value is None else pytest.approx(value, rel=1e-6) for value in expected]
    with torch.no_grad():
        for block in model.blocks:
            block.attention.o_proj.weight.mul_(2)
    model.config.norm_method.after_step(model, 400, max_steps=20000)
    doubled = [None if value is None else pytest.approx(4 * value, rel=1e-6) for value in expected]
    assert c_attn(model) == doubled


def test_a_foreign_method_does_not_pass_for_the_models_own(small: Build) -> None:
    model = build(small, {"method": "bhyt", "kappa": 5.0})
    with pytest.raises(AssertionError, match="was built with"):
        ModelConfig(norm={"method": "bhyt"}).norm_method.after_step(model, 1, 1)


def test_a_mixture_may_hold_a_mixture(small: Build) -> None:
    inner = {"method": "mix_ln", "post_share": 0.5}
    model = build(small, mixture({"0-3": inner}, otherwise={"method": "bhyt"}, train_length=32))
    assert [type(block) for block in model.blocks] == [PostNormBlock] * 3 + [Block] * 3
    assert [value is not None for value in c_attn(model)] == [False] * 4 + [True] * 2
    assert model.blocks[5].attention_norm.train_length.item() == 32


def test_plain_values_round_trip() -> None:
    config = ModelConfig(norm=mixture({"0-1": {"method": "lns"}, "3": {"method": "bhyt", "kappa": 5.0}}))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("norm", "named"),
    [
        (mixture({"0-1": {"method": "lsn"}}), "lsn"),
        (mixture({"0-1": {"method": "bhyt", "kapa": 1.0}}), "kapa"),
        (mixture({"0-1": {"method": "bhyt", "kappa": 0.0}}), "kappa"),
        (mixture({"0-1": "lns"}), "0-1.*lns.*mapping"),
        (mixture({"1-0": {"method": "lns"}}), "1-0"),
        (mixture({"first": {"method": "lns"}}), "first"),
        (mixture({3: {"method": "lns"}}), "3.*text"),
        (mixture(["lns"]), "layers.*mapping"),
        (mixture({}, otherwise={"kappa": 1.0}), "method"),
        (mixture({}, train_length=1.5), "train_length"),
        ({"method": "bhyt", "exact_layers": "2-1"}, "exact_layers"),
        ({"method": "bhyt", "exact_layers": [1, 2]}, r"exact_layers.*text or a whole number or null"),
        ({"method": "bhyt", "exact_layers": True}, "exact_layers"),
        ({"method": "bhyt", "kappa_schedule": "linear"}, "kappa_schedule.*one of constant, inverse_sqrt"),
        ({"method": "bhyt_star", "kappa_schedule": 0.5}, "kappa_schedule"),
        ({"method": "dyt", "alpha_other": "big"}, "alpha_other.*a number or null"),
    ],
)
def test_bad_option_is_named(norm: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as refusal:
        ModelConfig(norm=norm)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("norm", "named"),
    [
        (mixture({"0-6": {"method": "lns"}}), "0-6.*above 5"),
        (mixture({"6-": {"method": "lns"}}), "6-.*above 5"),
        (mixture({"0-3": {"method": "lns"}, "3-4": {"method": "dyt"}}), "layer 3 .*0-3.*3-4"),
        (mixture({"0-1": {"method": "bhyt", "exact_layers": "6"}}), "exact_layers.*above 5"),
        ({"method": "bhyt", "exact_layers": 6}, "exact_layers.*above 5"),
    ],
)
def test_what_does_not_fit_the_depth_is_refused(small: Build, norm: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named), torch.device("meta"):
        build(small, norm)


# BHyT's own choices by layer


@pytest.mark.parametrize("mu_term", [False, True])
def test_exact_layers_measure_at_both_sites(small: Build, mu_term: bool) -> None:
    """They are blocks of BHyT*; the others are as before, c_attn included."""
    options = {"kappa": 4.0, "mu_term": mu_term}
    model = build(small, {"method": "bhyt", "exact_layers": "0,4-", **options})
    approximate, exact = build(small, {"method": "bhyt", **options}), build(small, {"method": "bhyt_star", **options})
    x = torch.randn(2, 7, 32)
    for layer, block in enumerate(model.blocks):
        same, other = (exact, approximate) if layer in (0, 4, 5) else (approximate, exact)
        assert torch.equal(block(x), same.blocks[layer](x)), layer
        assert not torch.equal(block(x), other.blocks[layer](x)), layer
        kinds = (FirstBoundedTanh, BoundedTanh) if same is exact else (FirstBHyT, SecondBHyT)
        assert (type(block.attention_norm), type(block.mlp_norm)) == kinds
    assert [value is None for value in c_attn(model)] == [True, False, False, False, True, True]
    assert c_attn(model)[1:4] == c_attn(approximate)[1:4]


def test_a_whole_number_is_one_exact_layer(small: Build) -> None:
    """``--model.config.norm.exact_layers 3`` arrives as a number."""
    assert [value is None for value in c_attn(build(small, {"method": "bhyt", "exact_layers": 3}))].index(True) == 3


SCHEDULES = {"constant": 0.0, "inverse_sqrt": -0.5, "sqrt": 0.5, "fourth_root": 0.25}


@pytest.mark.parametrize("method", ["bhyt", "bhyt_star"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kappa_schedules(small: Build, method: str, schedule: str) -> None:
    """κ·l^p in block l, at both sites; a bounded final norm has κ itself."""
    model = build(small, {"method": method, "kappa": 6.0, "kappa_schedule": schedule, "lambda_final": 1.0}).double()
    x = torch.randn(4, 32, dtype=torch.float64)
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    for number, block in enumerate(model.blocks, start=1):
        kappa = 6.0 * number ** SCHEDULES[schedule]
        assert block.attention_norm.kappa.item() == pytest.approx(kappa, rel=1e-6)
        assert block.mlp_norm.kappa.item() == pytest.approx(kappa, rel=1e-6)
        torch.testing.assert_close(block.attention_norm(x)[0], torch.tanh(2.0 / kappa * scaled), rtol=1e-6, atol=0)
    torch.testing.assert_close(model.norm(x), torch.tanh(scaled / 6.0), rtol=1e-6, atol=0)


def test_the_correction_has_the_kappa_of_its_block(small: Build) -> None:
    """v2 = v1 + c_attn·λ1²/κ_l²."""
    model = build(small, {"method": "bhyt", "kappa": 4.0, "kappa_schedule": "inverse_sqrt"}).double()
    x = torch.randn(4, 32, dtype=torch.float64)
    for number, block in enumerate(model.blocks, start=1):
        block.attention_norm.c_attn.fill_(3.0)
        variance: Tensor = block.attention_norm(x)[1][0]
        expected = x.pow(2).mean(-1, keepdim=True) + 3.0 * (2.0 / 4.0) ** 2 * number
        torch.testing.assert_close(variance, expected, rtol=1e-6, atol=0)


def test_kinds_of_first_site_stay_plain_without_options(small: Build) -> None:
    assert {type(block.attention_norm) for block in build(small, {"method": "by_layer"}).blocks} == {FirstRMSNorm}


def test_each_part_lives_its_own_life(small: Build) -> None:
    """Two tapers of different schedules and a removal in one model; the scale is held by the last part alone."""
    taper = {"method": "tapernorm_all", "taper_start": 0.2, "taper_end": 0.4}
    removal = {"method": "fake_ln", "kind": "rmsnorm"} | dict.fromkeys(("start_mlp", "start_qk", "start_v"), 1)
    model = build(small, mixture({"0-1": taper, "2-3": removal}, {**taper, "taper_end": 0.8}))
    assert model.scale_anchor is not None
    phases = []
    for _ in live(model, 10):
        phases.append((model.blocks[0].mlp_norm.phase, model.blocks[5].mlp_norm.phase, model.norm.phase))
    assert phases[1] == ("taper", "taper", "taper")
    assert phases[5] == ("linear", "taper", "taper")
    assert phases[9] == ("linear", "linear", "linear")
    assert float(model.scale_anchor.average.weight) == 1  # of ten steps, the last before the start alone
    assert all(block.mlp_norm.is_linear for block in model.blocks[2:4])
