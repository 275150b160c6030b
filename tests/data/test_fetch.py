"""What is fetched lies where the other commands look; broken off it goes on, and is checked; offline nothing waits."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from tests.data.fake_hub import COMMIT, FakeHub, of_folder, serving


def c4_file(split: str, number: int) -> bytes:
    rows = (json.dumps({"text": f"{split} {number} document {i} " * 5, "url": f"u{i}"}) + "\n" for i in range(120))
    return gzip.compress("".join(rows).encode(), mtime=0)


def c4_hub(num_files: int) -> FakeHub:
    name = "allenai/c4/en/c4-{}.{:05d}-of-{:05d}.json.gz"
    files = {name.format("train", i, num_files): c4_file("train", i) for i in range(num_files)}
    files |= {name.format("validation", 0, 1): c4_file("validation", 0), "allenai/c4/en/other.txt": b"x"}
    return FakeHub(files | {"allenai/c4/README.md": b"card"})


def llmstack(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmstack", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5", **environment},
    )


def test_the_first_files_of_c4_then_more_then_prepared(tmp_path: Path) -> None:
    """Two training files; a third later without the first two again; the folder serves `prepare` by name."""
    hub, root = c4_hub(4), tmp_path / "hub"
    with serving(hub) as address:
        arguments = ["fetch", "--what", "c4", "--out", str(root)]
        first = llmstack(*arguments, "--files", "2", HF_ENDPOINT=address)
        assert first.returncode == 0, first.stderr
        there = sorted(str(path.relative_to(root)) for path in root.rglob("*.gz"))
        assert there == [
            "allenai/c4/en/c4-train.00000-of-00004.json.gz",
            "allenai/c4/en/c4-train.00001-of-00004.json.gz",
            "allenai/c4/en/c4-validation.00000-of-00001.json.gz",
        ]
        hub.requests.clear()
        again = llmstack(*arguments, "--files", "3", HF_ENDPOINT=address)
        assert again.returncode == 0, again.stderr
        got = {request.split("/")[-1] for request in hub.requests if request.startswith("GET") and "resolve" in request}
        assert got == {"c4-train.00002-of-00004.json.gz"}
    manifest = json.loads((root / "allenai/c4/manifest.json").read_text())
    assert manifest["commit"] == COMMIT
    assert len(manifest["files"]) == 5
    for name, record in manifest["files"].items():
        content = hub.files[f"allenai/c4/{name}"]
        assert (root / "allenai/c4" / name).read_bytes() == content
        assert record == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    corpus, tokenizer = str(root / "allenai/c4/en/c4-train.00000-of-00004.json.gz"), str(tmp_path / "T")
    trained = llmstack("tokenizer", "train", "--files", corpus, "--vocab-size", "280", "--out", tokenizer)
    assert trained.returncode == 0, trained.stderr
    out = ["--tokenizer", tokenizer, "--out", str(tmp_path / "prepared")]
    prepared = llmstack("prepare", "--source", "c4", "--heldout", "c4:validation", *out, LLMSTACK_DATA=str(root))
    assert prepared.returncode == 0, prepared.stderr
    found = json.loads(prepared.stdout)
    assert (found["train"]["documents"], found["heldout"]["documents"]) == (360, 120)


def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path) -> None:
    hub = c4_hub(1)
    (name,) = (name for name in hub.files if "train" in name)
    hub.files[name] = os.urandom(30 << 20)
    hub.cut.add(name)
    with serving(hub) as address:
        arguments = ["fetch", "--what", "c4", "--out", str(tmp_path)]
        fetched = llmstack(*arguments, HF_ENDPOINT=address)
        if fetched.returncode != 0:
            assert len(fetched.stderr.strip().splitlines()[-1]) < 300
            fetched = llmstack(*arguments, HF_ENDPOINT=address)
        assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / name).read_bytes() == hub.files[name]
    assert any(name.split("/")[-1] in request and "bytes=" in request for request in hub.requests)


def test_what_is_not_what_the_hub_says_is_not_kept(tmp_path: Path) -> None:
    hub = c4_hub(1)
    (name,) = (name for name in hub.files if "train" in name)
    tree = hub.tree
    hub.tree = lambda repo: [  # type: ignore[method-assign]
        entry | ({"lfs": {"oid": "0" * 64, "size": entry["size"], "pointerSize": 1}} if "train" in str(entry) else {})
        for entry in tree(repo)
    ]
    with serving(hub) as address:
        fetched = llmstack("fetch", "--what", "c4", "--out", str(tmp_path), HF_ENDPOINT=address)
    assert fetched.returncode == 2
    assert "not what the hub has" in fetched.stderr
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("what", "says"),
    [("lima", "the hub refuses it (403); its owner wants"), ("openwebtext", "does not have it (404)")],
)
def test_a_refusal_is_one_line(tmp_path: Path, what: str, says: str) -> None:
    hub = c4_hub(1)
    hub.gated.add("GAIR/lima")
    with serving(hub) as address:
        fetched = llmstack("fetch", "--what", what, "--out", str(tmp_path), HF_ENDPOINT=address)
    assert fetched.returncode == 2
    assert says in fetched.stderr
    assert len(fetched.stderr.strip().splitlines()) == 1


def test_without_a_network_nothing_waits(tmp_path: Path) -> None:
    """An absent set is one line at once, for every command; so is a hub that is not there."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "LLMSTACK_DATA": str(tmp_path)}
    for arguments, says in (
        (["prepare", "--source", "c4", "--tokenizer", "gpt2", "--out", "x"], "llmstack fetch --what c4"),
        (["prepare", "--source", __file__, "--tokenizer", "gpt2", "--out", "x"], "llmstack fetch --what gpt2"),
        (
            ["prepare", "--source", "c4:test", "--tokenizer", "gpt2", "--out", "x"],
            "no split 'test'; it has",
        ),
        (["fetch", "--what", "c4"], "cannot be reached"),
        (["fetch", "--what", "c5"], "--what c5: not known"),
    ):
        start = time.monotonic()
        refused = llmstack(*arguments, **nowhere)
        assert refused.returncode == 2, refused.stderr
        assert says in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
        assert time.monotonic() - start < 15


def test_benchmarks_as_the_hub_has_them(shared: Path, tmp_path: Path) -> None:
    """The shared folder, served as the hub and fetched, loads as it does there."""
    hub = of_folder(shared / "eval")
    with serving(hub) as address:
        fetched = llmstack("fetch", "--what", "arc,winogrande,mmlu", "--out", str(tmp_path), HF_ENDPOINT=address)
    assert fetched.returncode == 0, fetched.stderr
    for repo, config, split, rows in (
        ("allenai/ai2_arc", "ARC-Easy", "test", 2376),
        ("allenai/winogrande", "winogrande_xl", "validation", 1267),
        ("cais/mmlu", "anatomy", "dev", 5),
    ):
        loaded = datasets.load_dataset(str(tmp_path / repo), config, split=split, cache_dir=str(tmp_path / "cache"))
        assert len(loaded) == rows
