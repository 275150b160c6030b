"""Small models that every test of this room builds from."""

from collections.abc import Callable
from typing import Any

import pytest

from llmstack.model import ModelConfig

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture
def small() -> Callable[..., ModelConfig]:
    """A configuration of width 32, with overrides."""

    def build(**overrides: Any) -> ModelConfig:
        return ModelConfig(**{**SMALL, **overrides})

    return build
