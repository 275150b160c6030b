"""The real stories260K and small random models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack.checkpoint import load_model
from llmstack.model import Llama, ModelConfig


@pytest.fixture(scope="session")
def stories(shared: Path) -> Llama:
    return load_model(shared / "checkpoints/stories260K/hf")


@pytest.fixture(scope="session")
def published_ids(shared: Path) -> list[int]:
    """What greedy decoding of stories260K from BOS gives."""
    return json.loads((shared / "checkpoints/stories260K/greedy-256.ids.json").read_text())


@pytest.fixture
def random_model() -> Callable[..., Llama]:
    """A narrow model; weights large enough that its greedy choices are no near-ties."""

    def build(**overrides: Any) -> Llama:
        values = {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
        }
        torch.manual_seed(0)
        return Llama(ModelConfig(**{**values, **overrides})).eval()

    return build
