"""The shared tokenizers and documents."""

import json
from pathlib import Path

import pytest

from llmstack.tokenizer import Tokenizer, load_tokenizer

PATHS = {
    "llama-2": "tokenizers/llama-2/tokenizer.model",
    "tok512": "checkpoints/stories260K/tok512.model",
    "mistral-v1": "tokenizers/mistral-v1/tokenizer.model.v1",
    "mistral-v3": "tokenizers/mistral-v3/mistral_instruct_tokenizer_240323.model.v3",
    "llama-3": "tokenizers/llama-3/tokenizer.model",
    "gpt2": "tokenizers/gpt2",
    "gpt-neox": "tokenizers/gpt-neox-olmo/tokenizer.json",
}


@pytest.fixture(scope="session")
def c4(shared: Path) -> list[str]:
    with (shared / "c4/c4_en_valid_1k.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="session")
def paths(shared: Path) -> dict[str, Path]:
    return {name: shared / path for name, path in PATHS.items()}


@pytest.fixture(scope="session")
def loaded(paths: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def encoded(loaded: dict[str, Tokenizer], c4: list[str]) -> dict[str, list[list[int]]]:
    """Ids of the 1,000 documents, of each kind."""
    return {name: tokenizer.encode_batch(c4) for name, tokenizer in loaded.items()}


# Mistral v1 differs from v3 in its file alone.
@pytest.fixture(params=[name for name in PATHS if name != "mistral-v1"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(kind: str, loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded[kind]
