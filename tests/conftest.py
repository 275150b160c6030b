"""Fixtures shared by all tests."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Prepared data goes to a cache of the test run's own (each worker's, under pytest-xdist), not to the user's.
_cache = tempfile.TemporaryDirectory(prefix="llmstack-tests-")
os.environ["LLMSTACK_CACHE"] = _cache.name

SHARED = Path(os.environ.get("LLMSTACK_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real corpora, tokenizers and checkpoints; a test that needs it skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no shared data at {SHARED} (set LLMSTACK_SHARED)")
    return SHARED / "data"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=30).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for Slurm come first, so that no worker is left alone with them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))
