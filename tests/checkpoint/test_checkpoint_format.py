"""The format: what is written comes back bit for bit, and no damage goes unseen."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import llmstack.checkpoint.format as checkpoint_format
from llmstack.checkpoint import BrokenCheckpoint, read_checkpoint, write_checkpoint
from llmstack.checkpoint.format import FORMAT_VERSION, remove_leftovers
from llmstack.errors import UserError
from llmstack.model import ModelConfig

METHODS = ("rmsnorm", "layernorm", "bhyt", "bhyt_star")


def write_small(folder: Path, value: float = 1.0, tokenizer: Path | None = None) -> Path:
    return write_checkpoint(
        folder,
        step=25,
        config={"hidden_size": 4},
        weights={"w": torch.full((8, 8), value)},
        optimizer={"w/exp_avg": torch.full((8, 8), value / 2)},
        state={"value": value},
        tokenizer=tokenizer,
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "some-tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_policy.json").write_text('{"bos": true, "eos": false}\n')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_is_bit_equal_for_each_norm(build, tmp_path, method):
    model = build(method)
    weights = model.state_dict()
    optimizer = {f"{name}/exp_avg": torch.randn_like(p) for name, p in model.named_parameters()}
    optimizer["norm.weight/step"] = torch.tensor(25.0)
    path = write_checkpoint(
        tmp_path / "step-00000025", step=25, config=model.config.to_dict(), weights=weights, optimizer=optimizer
    )
    found = read_checkpoint(path)
    assert found.step == 25
    assert ModelConfig.from_dict(found.config) == model.config
    for written, read in ((weights, found.weights()), (optimizer, found.optimizer())):
        assert set(written) == set(read)
        for name, tensor in written.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name
    if method == "bhyt":
        assert found.weights()["layers.1.attention_norm.c_attn"].dtype == torch.float32
        assert found.weights()["layers.1.attention_norm.train_length"].item() == 1024 + 7


def test_dtypes_and_odd_values_survive(tmp_path):
    weights = {
        "bf16": torch.tensor([1.0, -0.0, float("inf"), float("nan"), 1e-40], dtype=torch.bfloat16),
        "fp64": torch.tensor([1e-300], dtype=torch.float64),
        "int64": torch.tensor([2**62 + 1, -1]),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    found = read_checkpoint(write_checkpoint(tmp_path / "step-00000001", step=1, config={}, weights=weights)).weights()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), raw), name


def test_tied_head_is_stored_once(build, tmp_path):
    model = build(tie_word_embeddings=True)
    weights = {**model.state_dict(), "lm_head.weight": model.lm_head.weight}
    path = write_checkpoint(tmp_path / "step-00000001", step=1, config=model.config.to_dict(), weights=weights)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
        assert "embed_tokens.weight" in file.keys()  # noqa: SIM118


def test_state_and_absent_parts(tmp_path, tokenizer):
    state = {"sampler": {"seed": 2**63, "position": 17}, "best": 1 / 3, "name": "prova è", "list": [1, None, True]}
    path = write_checkpoint(tmp_path / "a" / "step-00000007", step=7, config={}, weights={}, state=state)
    found = read_checkpoint(path)
    assert found.state == state
    assert found.tokenizer_path is None
    assert len(found.optimizer()) == len(found.weights()) == 0
    found = read_checkpoint(write_small(tmp_path / "step-00000025", tokenizer=tokenizer))
    assert found.tokenizer_path is not None
    assert contents(found.tokenizer_path) == contents(tokenizer)


def test_read_tensors_outlive_the_files(tmp_path):
    found = read_checkpoint(write_small(tmp_path / "step-00000025", 3.0))
    tensor = found.weights()["w"]
    with open(found.path / "model.safetensors", "r+b") as file:
        file.truncate(0)
    assert torch.equal(tensor, torch.full((8, 8), 3.0))


def test_every_flipped_byte_truncation_and_loss_is_seen(tmp_path, tokenizer):
    path = write_small(tmp_path / "step-00000025", tokenizer=tokenizer)
    names = list(contents(path))
    assert len(names) == 5
    for name in names:
        file = path / name
        good = file.read_bytes()
        for position in {0, 9, len(good) // 2, len(good) - 2}:
            damaged = bytearray(good)
            damaged[position] ^= 0x10
            file.write_bytes(damaged)
            with pytest.raises(BrokenCheckpoint, match=file.name) as error:
                read_checkpoint(path)
            assert "\n" not in str(error.value)
        for length in (0, 1, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:length])
            if name == "checkpoint.json" and length == len(good) - 1:
                continue  # only the final line end is gone: the same JSON
            for verify in (True, False):
                with pytest.raises(BrokenCheckpoint, match=file.name):
                    read_checkpoint(path, verify)
        file.write_bytes(good + b"\n?")
        with pytest.raises(BrokenCheckpoint, match=file.name):
            read_checkpoint(path)
        file.unlink()
        with pytest.raises(BrokenCheckpoint, match=rf"{file.name} is missing"):
            read_checkpoint(path)
        file.write_bytes(good)
    assert read_checkpoint(path).step == 25


def test_newer_format_is_refused_with_a_sentence(tmp_path):
    path = write_small(tmp_path / "step-00000025")
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["format_version"] == FORMAT_VERSION == 1
    manifest.update(format_version=2, files="something else")
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(BrokenCheckpoint, match=r"format version 2.*newer llmstack"):
        read_checkpoint(path)


def test_a_manifest_cannot_point_outside(tmp_path):
    path = write_small(tmp_path / "step-00000025")
    outside = {"name": "../secret", "role": "model", "size": 0, "sha256": ""}
    (path / "checkpoint.json").write_text(
        checkpoint_format._manifest_text({"step": 1, "config": {}, "state": {}, "files": [outside]})
    )
    with pytest.raises(BrokenCheckpoint, match="outside the checkpoint"):
        read_checkpoint(path)


def test_replacing_a_checkpoint_leaves_the_new_one_alone(tmp_path):
    path = write_small(tmp_path / "step-00000025", 1.0)
    write_small(path, 2.0)
    assert read_checkpoint(path).state == {"value": 2.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000025"]


def test_another_folder_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(UserError, match="is no checkpoint"):
        write_small(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "x"


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_small(tmp_path / "step-00000025")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_missing_tokenizer_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="no tokenizer folder"):
        write_small(tmp_path / "step-00000025", tokenizer=tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [0, 1000, 2**20, 1_200_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, fork, limit):
    """The limit on file sizes makes write fail in the manifest, the weights or the optimiser state, as a full disk."""
    write_small(tmp_path / "step-00000025")

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(
            UserError, match=r"cannot write .*step-00000050: .*too large.*; check the disk space"
        ) as error:
            write_checkpoint(
                tmp_path / "step-00000050",
                step=50,
                config={},
                weights={"w": torch.zeros(512, 512)},
                optimizer={"w/exp_avg": torch.zeros(600, 600)},
            )
        assert "\n" not in str(error.value)

    assert os.waitpid(fork(write_too_much), 0)[1] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000025"]
    read_checkpoint(tmp_path / "step-00000025")


def test_no_permission_is_one_line(tmp_path):
    if os.geteuid() == 0:
        # Root may write everywhere but where nothing can be made.
        target = Path("/proc/step-00000001")
    else:
        tmp_path.chmod(0o500)
        target = tmp_path / "step-00000001"
    with pytest.raises(UserError, match=f"cannot write {target}"):
        write_small(target)


def signalling_itself(sent: signal.Signals, moment: int) -> list[int]:
    """Make this process send itself a signal at the ``moment``-th of all the times before and after a disk call."""
    calls = [0]

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tick()
            result = function(*arguments, **options)
            tick()
            return result

        def tick() -> None:
            calls[0] += 1
            if calls[0] == moment:
                os.kill(os.getpid(), sent)

        return call

    checkpoint_format.serialize_file = around(checkpoint_format.serialize_file)
    for module, name in ((os, "fsync"), (os, "rename"), (shutil, "copyfile"), (shutil, "rmtree")):
        setattr(module, name, around(getattr(module, name)))
    return calls


@pytest.mark.parametrize("replace", [False, True])
def test_sigkill_at_any_moment_leaves_whole_checkpoints(tmp_path, fork, tokenizer, replace):
    """A process killed before and after each call that reaches the disk, in a new checkpoint and in replacing one."""
    outcomes = []
    while True:
        parent = tmp_path / f"run-{len(outcomes)}"
        write_small(parent / "step-00000025")
        if replace:
            write_small(parent / "step-00000050", 5.0)

        def write(moment: int = len(outcomes) + 1, parent: Path = parent) -> None:
            signalling_itself(signal.SIGKILL, moment)
            write_small(parent / "step-00000050", 2.0, tokenizer)

        status = os.waitpid(fork(write), 0)[1]
        assert read_checkpoint(parent / "step-00000025").state == {"value": 1.0}
        arrived = (parent / "step-00000050").exists()
        outcomes.append(read_checkpoint(parent / "step-00000050").state["value"] if arrived else None)
        write_small(parent / "step-00000075")
        names = {"step-00000025", "step-00000075"} | ({"step-00000050"} if arrived else set())
        assert {entry.name for entry in parent.iterdir()} == names
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(outcomes) > 20
    assert set(outcomes) == ({2.0, 5.0, None} if replace else {2.0, None})


def test_sigkill_at_random_times(tmp_path, fork):
    def write_for_ever(parent: Path) -> None:
        step = 0
        while True:
            step += 1
            weights = {"w": torch.full((1024, 2048), float(step))}
            write_checkpoint(parent / f"step-{step:08d}", step=step, config={}, weights=weights)

    for delay in (0.0, 0.013, 0.029, 0.041):
        parent = tmp_path / str(delay)
        process = fork(lambda parent=parent: write_for_ever(parent))
        while not (parent / "step-00000002").exists():
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        for folder in sorted(parent.glob("step-*")):
            found = read_checkpoint(folder)
            assert torch.equal(found.weights()["w"], torch.full((1024, 2048), float(found.step)))
        remove_leftovers(parent)
        assert not list(parent.glob(".*"))


def test_a_writer_at_work_is_not_taken_for_a_leftover(tmp_path, fork):
    """A second writer beside one that is in the middle of its work leaves its hidden folder alone."""

    def write() -> None:
        signalling_itself(signal.SIGSTOP, 5)
        write_small(tmp_path / "step-00000050", 2.0)

    process = fork(write)
    assert os.WIFSTOPPED(os.waitpid(process, os.WUNTRACED)[1])
    write_small(tmp_path / "step-00000025")
    assert len(list(tmp_path.glob(".partial-step-00000050-*/model.safetensors"))) == 1
    os.kill(process, signal.SIGCONT)
    assert os.waitpid(process, 0)[1] == 0
    assert read_checkpoint(tmp_path / "step-00000050").state == {"value": 2.0}
