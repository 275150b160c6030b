"""A run's mirror in a store: what is there is whole, and a lost folder is made again from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from llmstack.checkpoint import Mirror, RunFolder, load_model, read_checkpoint, resolve, write_checkpoint
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig

CONFIG = {"seed": 1, "model": {"hidden_size": 64}, "optim": {"betas": (0.9, 0.95)}, "trainer": {"devices": 1}}
MODEL = ModelConfig.preset("tiny", vocab_size=64, num_layers=1)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/store/run"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.open(tmp_path / "run", CONFIG)
    for step in (25, 50):
        save(run, step)
    (run.path / "metrics.csv").write_text("step\n1\n")
    return run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSTACK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(run: RunFolder, step: int) -> None:
    torch.manual_seed(step)
    weights = Llama(MODEL).state_dict()
    write_checkpoint(run.checkpoint_path(step), step=step, config=MODEL.to_dict(), weights=weights)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stored(url: str) -> set[str]:
    store, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/") for path in store.find(root)}


def change(url: str, name: str, edit: Any) -> None:
    store, root = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{root}/{name}", edit(store.cat_file(f"{root}/{name}")))


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def test_a_lost_folder_is_made_again(run: RunFolder, url: str, tmp_path: Path) -> None:
    Mirror(url).send(run)
    again = RunFolder.open(tmp_path / "again", CONFIG)
    assert Mirror(url).restore(again) == [25, 50]
    assert content(again.path) == content(run.path)
    assert not Mirror(url).is_finished
    assert Mirror(url).restore(again) == []
    run.finish(50)
    Mirror(url).send(run)
    assert Mirror(url).is_finished


def test_it_holds_what_the_folder_holds(run: RunFolder, url: str) -> None:
    """What was pruned goes, what was cut off on the way goes too, a checkpoint written anew is sent anew."""
    mirror = Mirror(url)
    mirror.send(run)
    save(run, 75)
    run.prune(2)
    store, root = fsspec.core.url_to_fs(url)
    store.makedirs(f"{root}/checkpoints/step-00000060")
    store.pipe_file(f"{root}/checkpoints/step-00000060/model.safetensors", b"half")
    torch.manual_seed(1)
    write_checkpoint(run.checkpoint_path(50), step=50, config=MODEL.to_dict(), weights=Llama(MODEL).state_dict())
    mirror.send(run)
    assert stored(url) == {*content(run.path), "folder.txt"}
    again = RunFolder.open(run.path.with_name("again"), CONFIG)
    mirror.restore(again)
    assert content(again.path) == content(run.path)


def test_a_folder_that_is_ahead_stays_as_it_is(run: RunFolder, url: str) -> None:
    Mirror(url).send(run)
    save(run, 75)
    (run.path / "metrics.csv").write_text("step\n1\n2\n")
    before = content(run.path)
    assert Mirror(url).restore(run) == []
    assert content(run.path) == before


@pytest.mark.parametrize("fault", ["no manifest", "damaged"])
def test_what_is_not_whole_is_not_taken(
    run: RunFolder, url: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sending that was killed, or a byte that changed: the checkpoint before it is there."""
    Mirror(url).send(run)
    store, root = fsspec.core.url_to_fs(url)
    if fault == "damaged":
        change(url, "checkpoints/step-00000050/model.safetensors", flipped)
    else:
        store.rm_file(f"{root}/checkpoints/step-00000050/checkpoint.json")
    again = RunFolder.open(tmp_path / "again", CONFIG)
    with caplog.at_level(logging.WARNING):
        assert Mirror(url).restore(again) == [25]
    assert ("left there" in caplog.text) == (fault == "damaged")
    assert [path.name for path in again.checkpoints_path.iterdir()] == ["step-00000025"]
    if fault == "damaged":
        with pytest.raises(UserError, match="SHA-256 does not match"):
            resolve(f"{url}/checkpoints/step-00000050")


def test_a_run_does_not_begin_anew_because_all_is_broken(run: RunFolder, url: str, tmp_path: Path) -> None:
    Mirror(url).send(run)
    before = stored(url)
    for step in (25, 50):
        change(url, f"checkpoints/step-{step:08d}/model.safetensors", flipped)
    again = RunFolder.open(tmp_path / "again", CONFIG)
    with pytest.raises(UserError, match="all 2 checkpoints are broken"):
        Mirror(url).restore(again)
    assert stored(url) == before


def test_tables_are_there_before_the_checkpoints_they_go_with(
    run: RunFolder, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the sending is killed, the run can be made again from what is there."""
    order = list[str]()
    monkeypatch.setattr("llmstack.checkpoint.remote.put", lambda store, source, target: order.append(source.name))
    run.finish(50)
    Mirror(url).send(run)
    assert order[0] == "config.yaml"
    assert order.index("metrics.csv") < order.index("model.safetensors") < order.index("checkpoint.json")
    assert order[-1] == "run.json"


def test_a_damaged_copy_is_sent_anew(run: RunFolder, url: str, tmp_path: Path) -> None:
    """And a damaged original is not."""
    Mirror(url).send(run)
    change(url, "checkpoints/step-00000050/model.safetensors", flipped)
    again, mirror = RunFolder.open(tmp_path / "again", CONFIG), Mirror(url)
    assert mirror.restore(again) == [25]
    save(again, 50)
    mirror.send(again)
    assert read_checkpoint(resolve(f"{url}/checkpoints/step-00000050").path).step == 50
    manifest = again.checkpoint_path(50) / "checkpoint.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 50', b'"step": 51'))
    before = stored(url)
    Mirror(url).send(again)
    assert stored(url) == before
    assert read_checkpoint(resolve(f"{url}/checkpoints/step-00000050").path).step == 50


def test_a_folder_of_something_else_is_no_mirror(url: str) -> None:
    store, root = fsspec.core.url_to_fs(url)
    store.makedirs(root)
    Mirror(url).refuse_other_run("runs/a", CONFIG, [])
    store.pipe_file(f"{root}/metrics.csv", b"mine")
    with pytest.raises(UserError, match="holds something else than a run"):
        Mirror(url).refuse_other_run("runs/a", CONFIG, [])


def test_another_run_is_refused(run: RunFolder, url: str) -> None:
    """Of another configuration, or of the same one in another folder."""
    mirror, folder = Mirror(url), str(run.path)
    mirror.refuse_other_run(folder, CONFIG, [])
    mirror.send(run)
    mirror.refuse_other_run(folder, CONFIG, [])
    mirror.refuse_other_run(folder, {**CONFIG, "trainer": {"devices": 2}}, ["trainer.devices"])
    with pytest.raises(UserError, match="seed is 1 there and 2 here"):
        mirror.refuse_other_run(folder, {**CONFIG, "seed": 2}, ["trainer.devices"])
    with pytest.raises(UserError, match=f"mirrors the run {folder}, not runs/b: choose another run.mirror"):
        mirror.refuse_other_run("runs/b", CONFIG, [])


@pytest.mark.parametrize("name", ["", "/checkpoints/step-00000050"])
def test_a_model_is_loaded_from_its_address(run: RunFolder, url: str, cache: Path, name: str) -> None:
    """Of a run the newest checkpoint; what is in the cache is not copied again."""
    Mirror(url).send(run)
    source = resolve(url + name)
    assert source.checkpoint is not None
    assert source.checkpoint.step == 50
    expected = load_model(run.checkpoint_path(50)).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in load_model(source).state_dict().items())
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert read_checkpoint(resolve(url).path).step == 50
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("memory://nothing-here", "neither a checkpoint there"),
        ("nosuch://bucket/run", "cannot be reached"),
        ("memory://", "without a place"),
    ],
)
def test_addresses_without_a_checkpoint(address: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        resolve(address)
