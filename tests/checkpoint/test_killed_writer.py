"""A checkpoint of the size of a real one, and writers that are killed in the middle of it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmstack.checkpoint import Checkpoint, RunFolder, write_checkpoint

NAMES = [f"layers.{number}.weight" for number in range(6)]
ELEMENTS = 5_000_000


def weights(step: int) -> dict[str, Tensor]:
    return {name: torch.full((ELEMENTS,), float(step + number)) for number, name in enumerate(NAMES)}


def moments(step: int) -> dict[str, Tensor]:
    values = weights(-step)
    return {f"{name}/{moment}": values[name] for name in NAMES for moment in ("exp_avg", "exp_avg_sq")}


def write(run: RunFolder, step: int, ready: Path | None = None) -> float:
    """360 MB; the seconds that the save took. ``ready`` appears when it begins."""
    tensors = {"weights": weights(step), "optimizer": moments(step)}
    if ready is not None:
        ready.touch()
    started = time.monotonic()
    write_checkpoint(run.checkpoint_path(step), step=step, config={}, state={"n": step}, **tensors)
    return time.monotonic() - started


def is_right(found: Checkpoint) -> bool:
    expected = {**weights(found.step), **moments(found.step)}
    read = {**found.weights(), **found.optimizer()}
    same = all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    return same and read.keys() == expected.keys() and found.state == {"n": found.step}


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_sigkill_at_random_moments_of_a_save(tmp_path: Path, fork, kills: int) -> None:
    """Uniformly over the time that a save takes: the newest checkpoint is always whole, right, and none is lost."""
    run = RunFolder.open(tmp_path / "run", {})
    write(run, 1)
    window = write(run, 2)
    moment, step, newest, killed = random.Random(kills), 2, 2, 0
    while killed < kills:
        step += 1
        assert step < 20 * kills, "the writers are always faster than the signal"
        ready = tmp_path / f"ready-{step}"
        process = fork(lambda step=step, ready=ready: write(run, step, ready))
        while not ready.exists():
            time.sleep(0.001)
        time.sleep(moment.uniform(0, window))
        os.kill(process, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(process, 0)[1])
        found = run.newest_checkpoint()
        assert found is not None
        assert found.step in (newest, step)
        assert is_right(found)
        newest = found.step
        # What this writer left; what the one before it left is gone.
        assert len(list(run.checkpoints_path.glob(".*"))) <= 1
        run.prune(2)
    write(run, step + 1)
    assert {path.name for path in run.checkpoints_path.iterdir()} == {path.name for path in run.checkpoints()}
