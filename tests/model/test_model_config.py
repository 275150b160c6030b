"""ModelConfig: each bad value is refused by name; plain values round-trip."""

import json
from dataclasses import fields
from typing import Any

import pytest

from llmstack.errors import UserError
from llmstack.model import ModelConfig, RopeScaling
from llmstack.model.norms import METHODS

BAD = [
    *[(name, 0) for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")],
    *[(name, 0) for name in ("head_dim", "intermediate_size", "max_position_embeddings")],
    ("hidden_size", None),
    ("num_layers", -1),
    ("hidden_size", 130),
    ("num_kv_heads", 3),
    ("head_dim", 33),
    ("residual_dropout", 1.0),
    ("embedding_dropout", -0.1),
    ("rms_norm_eps", 0.0),
    ("rope_theta", -1.0),
    ("rope_theta", float("nan")),
    ("initializer_range", 0.0),
    ("positions", "alibi"),
    ("mlp", "swish"),
    ("initialisation", "xavier"),
    ("residual_dropout_schedule", "cosine"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name) as refusal:
        ModelConfig(**{name: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"factor": 0.0}, "factor"),
        ({"low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"facter": 8.0}, "facter"),
    ],
)
def test_bad_rope_scaling_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ModelConfig.from_dict({"rope_scaling": values})


@pytest.mark.parametrize(
    ("norm", "named"),
    [
        ({"method": "rmsnrom"}, "rmsnrom.*bhyt.*bhyt_star.*layernorm.*rmsnorm"),
        ({}, "method"),
        ({"method": "rmsnorm", "eps": 1e-5}, "eps"),
        ({"method": "bhyt_star", "train_length": 8}, "train_length"),
        *[({"method": "bhyt", f"{name}s": 1.0}, f"{name}s.*lambda_attention") for name in ("kappa", "lambda")],
        *[({"method": "bhyt", name: 0.0}, name) for name in ("lambda_attention", "lambda_mlp", "kappa")],
        ({"method": "bhyt", "lambda_final": -1.0}, "lambda_final"),
        ({"method": "bhyt", "lambda_final": float("nan")}, "lambda_final"),
        ({"method": "bhyt", "train_length": 0}, "train_length"),
        ({"method": "bhyt", "kappa": "1e1"}, "kappa"),
        ({"method": "bhyt", "trainable_lambda": "no"}, "trainable_lambda"),
        ({"method": "bhyt", "mu_term": 1}, "mu_term"),
        ({"method": "bhyt", "train_length": 1024.5}, "train_length"),
    ],
)
def test_bad_norm_option_is_named(norm: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ModelConfig(norm=norm)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_typo_in_any_norm_option_is_refused(method: str) -> None:
    for option in fields(METHODS[method]):
        with pytest.raises(UserError, match=f"{option.name}x"):
            ModelConfig(norm={"method": method, f"{option.name}x": option.default})
        ModelConfig(norm={"method": method, option.name: option.default})


def test_round_trip_through_json() -> None:
    config = ModelConfig(
        vocab_size=100,
        num_kv_heads=2,
        rope_scaling=RopeScaling(factor=8.0),
        norm={"method": "bhyt", "lambda_attention": 3, "train_length": 256},
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert ModelConfig.from_dict(ModelConfig().to_dict()) == ModelConfig()


def test_unknown_option_is_named_with_its_source() -> None:
    with pytest.raises(UserError, match=r"my\.yaml.*hiden_size"):
        ModelConfig.from_dict({"hiden_size": 64}, "my.yaml")


def test_presets() -> None:
    with pytest.raises(UserError, match=r"7b.*1b, 30m, 374m, 3b, tiny"):
        ModelConfig.preset("7b")
    large = ModelConfig.preset("3b", norm={"method": "bhyt"})
    assert large.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert (large.rope_theta, large.rms_norm_eps, large.head_size) == (500000.0, 1e-5, 128)
    assert large.norm_method.uses_train_length
    assert ModelConfig.preset("tiny").vocab_size is None
