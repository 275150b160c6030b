"""Prepared data travel through a store and come back as they were, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from llmstack.cli.main import main
from llmstack.data import PreparedData, prepare_source
from llmstack.data.remote import local_folder, send
from llmstack.errors import UserError
from llmstack.tokenizer import BosEosPolicy, Tokenizer
from llmstack.training.datamodule import open_sets


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/set" if request.param == "memory" else f"file://{tmp_path}/store/set"


@pytest.fixture
def prepared(
    write_rows: Callable[..., Path], tmp_path: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> PreparedData:
    rows = write_rows(f"document {i}" for i in range(200))
    return prepare_source(rows, tokenizer, policy, out=tmp_path / "out", unit_bytes=1000)


def test_there_and_back(prepared: PreparedData, url: str) -> None:
    """The same files; a second time nothing is copied."""
    send(prepared.folder, url)
    folder = local_folder(url)
    files = {str(p.relative_to(prepared.folder)): p.read_bytes() for p in prepared.folder.rglob("*") if p.is_file()}
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files
    opened, tokenizer, _ = open_sets([url])
    assert opened[0].identity == prepared.identity
    assert tokenizer.fingerprint == prepared.tokenizer_fingerprint
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert local_folder(url) == folder
    send(prepared.folder, url)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_what_is_damaged_on_the_way_is_not_taken(prepared: PreparedData, url: str, cache: Path) -> None:
    send(prepared.folder, url)
    store, root = fsspec.core.url_to_fs(url)
    shard = next(name for name in store.find(root) if name.endswith(".arrow"))
    raw = bytearray(store.cat_file(shard))
    raw[len(raw) // 2] ^= 1
    store.pipe_file(shard, bytes(raw))
    with pytest.raises(UserError, match="checksum"):
        local_folder(url)
    assert not [path for path in cache.iterdir() if path.name.startswith("remote") and path.suffix == ""]


def test_other_data_are_not_overwritten(
    prepared: PreparedData, url: str, write_rows: Callable[..., Path], tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    send(prepared.folder, url)
    other = prepare_source(write_rows((f"other {i}" for i in range(200)), "other.jsonl"), tokenizer, policy)
    with pytest.raises(UserError, match="holds other prepared data"):
        send(other.folder, url)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("memory://nothing/here", "no prepared data there"),
        ("gibberish://a/b", "cannot be reached"),
        ("s3://", "without a place"),
    ],
)
def test_what_is_not_there_is_one_line(address: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        local_folder(address)
    assert "\n" not in str(caught.value)


def test_the_command_sends_what_it_made(
    write_rows: Callable[..., Path],
    tmp_path: Path,
    cache: Path,
    tokenizer: Tokenizer,
    url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer.save(tmp_path / "T")
    rows = write_rows(f"document {i}" for i in range(200))
    assert main(["prepare", "--source", str(rows), "--tokenizer", str(tmp_path / "T"), "--out", url]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == url
    assert PreparedData(local_folder(url))["heldout"].num_documents == 50
