"""A tokenizer trained on the embedded corpus, and that corpus prepared with it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from llmstack.data import PreparedData, prepare_source
from llmstack.data.sources import embedded_documents
from llmstack.tokenizer import BosEosPolicy, Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer((document.text for document in embedded_documents()), 2048)


@pytest.fixture(scope="session")
def policy(tokenizer: Tokenizer) -> BosEosPolicy:
    return BosEosPolicy(bos=True, eos=True)


@pytest.fixture(scope="session")
def embedded(tokenizer: Tokenizer, policy: BosEosPolicy, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSTACK_CACHE", str(tmp_path_factory.mktemp("embedded")))
        return prepare_source("embedded", tokenizer, policy)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own."""
    root = tmp_path / "cache"
    monkeypatch.setenv("LLMSTACK_CACHE", str(root))
    return root


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes texts as JSON lines and returns the path."""

    def write(texts: Iterable[str], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write
