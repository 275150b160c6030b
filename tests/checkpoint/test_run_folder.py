"""The run folder: identity, the lock, and where to go on."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmstack.checkpoint import BrokenCheckpoint, MetricsRow, RunFolder, read_checkpoint, write_checkpoint
from llmstack.errors import UserError

CONFIG = {
    "seed": 1,
    "model": {"config": {"hidden_size": 64, "norm": {"method": "bhyt"}}},
    "data": {"files": ["a.txt", "b.txt"], "tokenizer": None},
    "optim": {"lr": 1e-5, "betas": (0.9, 0.95)},
}


def save(run: RunFolder, *steps: int) -> None:
    for step in steps:
        weights = {"w": torch.full((4,), float(step))}
        write_checkpoint(run.checkpoint_path(step), step=step, config={}, weights=weights)


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_life_of_a_run(tmp_path):
    run = RunFolder.open(tmp_path / "runs" / "a", CONFIG)
    assert run.status == "new"
    assert (
        run.config
        == yaml.safe_load(run.config_path.read_text())
        == {**CONFIG, "optim": {"lr": 1e-5, "betas": [0.9, 0.95]}}
    )
    assert run.newest_checkpoint() is None
    run.close()
    run = RunFolder.open(tmp_path / "runs" / "a", CONFIG)
    assert run.status == "resume"
    save(run, 25, 50)
    run.finish(50)
    assert run.status == "finished"
    run.close()
    assert RunFolder.open(tmp_path / "runs" / "a", CONFIG).status == "finished"
    assert json.loads((tmp_path / "runs" / "a" / "run.json").read_text()) == {"finished_step": 50}


def test_another_configuration_is_refused_with_the_keys_and_nothing_is_touched(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25)
    run.metrics.append(MetricsRow(1, loss=2.0))
    run.close()
    before = snapshot(tmp_path)
    other = {
        **CONFIG,
        "seed": 2,
        "model": {"config": {"hidden_size": 64, "norm": {"method": "rmsnorm"}, "mlp_bias": True}},
        "data": {"files": ["a.txt"]},
    }
    with pytest.raises(UserError) as error:
        RunFolder.open(tmp_path, other)
    message = str(error.value)
    for part in (
        "seed is 1 there and 2 here",
        'model.config.norm.method is "bhyt" there and "rmsnorm" here',
        "model.config.mlp_bias is not set there and true here",
        'data.files is ["a.txt", "b.txt"] there and ["a.txt"] here',
        "data.tokenizer is null there and not set here",
        "choose another run.dir",
    ):
        assert part in message
    assert "hidden_size" not in message
    assert "optim" not in message
    assert "\n" not in message
    assert snapshot(tmp_path) == before
    assert RunFolder.open(tmp_path, CONFIG).status == "resume"


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match=r"not empty and holds no run \(holiday.jpg"):
        RunFolder.open(tmp_path, CONFIG)
    assert [entry.name for entry in tmp_path.iterdir()] == ["holiday.jpg"]
    with pytest.raises(UserError, match="is a file"):
        RunFolder.open(tmp_path / "holiday.jpg", CONFIG)


def test_a_start_that_was_killed_before_the_config_is_no_obstacle(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".config.yaml.partial").write_text("seed:")
    assert RunFolder.open(tmp_path, CONFIG).status == "new"


def test_unreadable_config_names_the_file(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [1,\nb")
    with pytest.raises(UserError, match=r"config\.yaml is not readable as YAML") as error:
        RunFolder.open(tmp_path, CONFIG)
    assert "\n" not in str(error.value)


def hold(path: Path, then: Callable[[], Any]) -> Callable[[], None]:
    """Work of a process: take the run, say so, then go on."""

    def work() -> None:
        run = RunFolder.open(path, CONFIG)
        then()
        (path / "logs").mkdir(exist_ok=True)
        (path / "logs" / "ready").write_text("")
        time.sleep(60)
        run.close()

    return work


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_process_is_refused_at_once_and_told_who(tmp_path, fork):
    holder = fork(hold(tmp_path, lambda: None))
    wait_for(tmp_path / "logs" / "ready")
    before = snapshot(tmp_path)
    started = time.monotonic()
    with pytest.raises(UserError, match=f"in use by process {holder} on {re.escape(socket.gethostname())} "):
        RunFolder.open(tmp_path, CONFIG)
    assert time.monotonic() - started < 5
    assert snapshot(tmp_path) == before
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert RunFolder.open(tmp_path, CONFIG).status == "resume"


def test_the_same_process_cannot_open_it_twice(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        RunFolder.open(tmp_path, CONFIG)
    run.close()
    RunFolder.open(tmp_path, CONFIG).close()


def leave_forked_child(pids: Path) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
    pids.write_text(str(child))


def leave_data_worker(pids: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    pids.write_text(str(process.pid))


def leave_executed_child(pids: Path) -> None:
    # All descriptors that may be inherited are.
    pids.write_text(str(subprocess.Popen(["sleep", "60"], close_fds=False).pid))


@pytest.mark.parametrize("leave_child", [leave_forked_child, leave_data_worker, leave_executed_child])
def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path, fork, leave_child):
    run, pids = tmp_path / "run", tmp_path / "pid"
    parent = fork(hold(run, lambda: leave_child(pids)))
    wait_for(run / "logs" / "ready")
    child = int(pids.read_text())
    with pytest.raises(UserError, match=f"in use by process {parent} "):
        RunFolder.open(run, CONFIG)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        os.kill(child, 0)
        assert RunFolder.open(run, CONFIG).status == "resume"
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_does_not_free_the_lock_of_its_parent(tmp_path, fork):
    run = RunFolder.open(tmp_path, CONFIG)
    assert os.waitpid(fork(lambda: None), 0)[1] == 0
    with pytest.raises(UserError, match="in use"):
        RunFolder.open(tmp_path, CONFIG)
    run.close()


def test_a_reader_needs_no_lock(tmp_path, fork):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25)
    reader = RunFolder(tmp_path)
    assert reader.status == "resume"
    newest = reader.newest_checkpoint()
    assert newest is not None
    assert newest.step == 25


def test_checkpoints_are_sorted_by_step_and_nothing_else_counts(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 100_000_000, 99_999_999, 25)
    (run.checkpoints_path / ".partial-step-00000500-abcdef01").mkdir()
    (run.checkpoints_path / "step-best").mkdir()
    assert [path.name for path in run.checkpoints()] == ["step-00000025", "step-99999999", "step-100000000"]
    newest = run.newest_checkpoint()
    assert newest is not None
    assert newest.step == 100_000_000


def test_the_newest_is_that_of_the_last_step_whatever_looks_newer(tmp_path):
    """Copied back, touched or left behind by others: the step counts, not the clock, and only whole names."""
    run = RunFolder(tmp_path / "run")
    save(run, 5, 10)
    other = RunFolder(tmp_path / "other")
    save(other, 99)
    later = time.time() + 3600
    os.utime(run.checkpoint_path(5), (later, later))
    for name in ("step-00000099.old", ".step-00000099.partial", "step-99", "hpc_ckpt_99"):
        (run.checkpoints_path / name).mkdir()
    (run.checkpoints_path / "step-00000098").write_text("no folder")
    assert run.newest_checkpoint().step == 10
    assert [read_checkpoint(path).step for path in run.checkpoints()] == [5, 10]


def test_broken_newest_gives_the_one_before_loudly(tmp_path, caplog):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25, 50, 75, 100)
    damage(run.checkpoint_path(100))
    (run.checkpoint_path(75) / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        newest = run.newest_checkpoint()
    assert newest is not None
    assert newest.step == 50
    assert torch.equal(newest.weights()["w"], torch.full((4,), 50.0))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "step-00000100/model.safetensors is damaged" in messages[0]
    assert "step-00000075/model.safetensors is missing" in messages[1]


def test_the_warning_reaches_stderr_without_any_logging_set_up(tmp_path, capfd, fork):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25, 50)
    damage(run.checkpoint_path(50))

    def look() -> None:
        root = logging.getLogger()
        for handler in list(root.handlers):
            root.removeHandler(handler)
        assert run.newest_checkpoint() is not None

    assert os.waitpid(fork(look), 0)[1] == 0
    assert "broken checkpoint, taking the one before it" in capfd.readouterr().err


def test_all_broken_is_an_error_not_a_new_start(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25, 50)
    damage(run.checkpoint_path(25))
    damage(run.checkpoint_path(50))
    with pytest.raises(UserError, match=r"all 2 checkpoints are broken \(the newest: .*step-00000050") as error:
        run.newest_checkpoint()
    assert "\n" not in str(error.value)


def test_prune_keeps_the_newest(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25, 50, 75, 100)
    run.prune(2)
    assert [read_checkpoint(path).step for path in run.checkpoints()] == [75, 100]
    run.prune(5)
    assert len(run.checkpoints()) == 2
    assert len(list(run.checkpoints_path.iterdir())) == 2


def test_prune_does_not_count_a_broken_checkpoint_as_kept(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    save(run, 25, 100)
    damage(run.checkpoint_path(100))
    assert run.newest_checkpoint().step == 25
    run.prune(1)
    assert run.newest_checkpoint().step == 25
    save(run, 40)
    run.prune(1)
    assert [path.name for path in run.checkpoints()] == ["step-00000040", "step-00000100"]
    with pytest.raises(BrokenCheckpoint):
        read_checkpoint(run.checkpoint_path(100))
    save(run, 100)
    run.prune(1)
    assert [read_checkpoint(path).step for path in run.checkpoints()] == [100]


def save_with_losses(run: RunFolder, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        state = {} if loss is None else {"val_loss": loss}
        write_checkpoint(run.checkpoint_path(step), step=step, config={}, weights={"w": torch.ones(4)}, state=state)


def steps_of(run: RunFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in run.checkpoints()]


LOSSES = {10: 4.0, 20: 3.0, 30: None, 40: float("nan"), 50: 3.5, 60: 3.0, 70: None, 80: 3.6}


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ((2,), [20, 70, 80]),
        ((2, None, False), [70, 80]),
        ((1, 30), [20, 30, 60, 80]),
        ((1, 40, False), [40, 80]),
        ((3, 1000), [20, 60, 70, 80]),
        ((8, None), list(LOSSES)),
    ],
)
def test_prune_keeps_the_last_every_nth_and_the_best(tmp_path, rules, kept):
    """Of two equal losses the earlier; one that was not validated, or to nan, is never the best."""
    run = RunFolder.open(tmp_path, CONFIG)
    save_with_losses(run, LOSSES)
    run.prune(*rules)
    assert steps_of(run) == kept


def test_the_best_stays_the_best_of_those_present(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    assert run.best_checkpoint() is None
    best = []
    for step, loss in {10: None, 20: 5.0, 30: 4.0, 40: 4.5, 50: None, 60: 3.0}.items():
        save_with_losses(run, {step: loss})
        run.prune(2)
        found = run.best_checkpoint()
        best.append(found and found.step)
    assert best == [None, 20, 30, 30, 30, 60]
    assert steps_of(run) == [50, 60]


def test_a_broken_one_is_neither_the_best_nor_kept(tmp_path, caplog):
    run = RunFolder.open(tmp_path, CONFIG)
    save_with_losses(run, {10: 2.0, 20: 3.0, 30: 4.0, 40: 5.0})
    damage(run.checkpoint_path(10))
    with caplog.at_level(logging.WARNING):
        best = run.best_checkpoint()
    assert best is not None
    assert best.step == 20
    assert "broken checkpoint, taking the next best one" in caplog.text
    assert "step-00000010/model.safetensors is damaged" in caplog.text
    run.prune(1, keep_every=10)
    assert steps_of(run) == [20, 30, 40]
    # A lost file is seen without reading any tensor.
    (run.checkpoint_path(20) / "model.safetensors").unlink()
    run.prune(1)
    assert steps_of(run) == [30, 40]


def test_cut_metrics(tmp_path):
    run = RunFolder.open(tmp_path, CONFIG)
    for step in (1, 2, 3):
        run.metrics.append(MetricsRow(step, loss=float(step)))
    run.cut_metrics(2)
    assert [row["step"] for row in run.metrics.read()] == [1, 2]
