"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("LLMSTACK_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real corpora, tokenizers and checkpoints; a test that needs it skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no shared data at {SHARED} (set LLMSTACK_SHARED)")
    return SHARED / "data"
