"""Signals at any moment of two bare ranks: nothing hangs, no step is lost or made twice, every checkpoint is whole."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from llmstack.checkpoint import RunFolder, read_checkpoint
from tests.e2e.job import LAYOUTS, TINY, Job, callbacks, exact_rows, finished, rows_of

BOUND = 60
"""Seconds from the signal to the end of the last process."""

COMPILED = [word if word != "false" else "true" for word in TINY]

RHYTHM = ["--run.checkpoint_every", "3", "--run.validate_every", "4", "--run.diagnose_every", "null"]


def wait_for_moment(moment: str, job: Job, folder: Path) -> None:
    """Return in the midst of it."""
    if moment == "start-up":
        time.sleep(random.uniform(0, 6))
        return
    if moment == "compilation":  # in the first step of a start
        job.wait_for(lambda: (folder / "at-0").exists())
        time.sleep(random.uniform(0, 2))
        return
    job.wait_for(lambda: (folder / "at-0").exists())
    if moment == "save":
        checkpoints = job.run / "checkpoints"
        job.wait_for(lambda: any(path.name.startswith(".") for path in checkpoints.glob(".*")))
    else:
        job.wait_for(lambda: (folder / "validating").exists())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("each", [1, pytest.param(5, marks=pytest.mark.full)])
def test_signals_at_any_moment_do_no_harm(each: int, tmp_path: Path) -> None:
    """One run that is signalled again and again, to one rank or all, ends like the one that was not."""
    run, folder = tmp_path / "run", tmp_path / "orders"
    folder.mkdir()
    moments = ["start-up", "compilation", "save", "validation"] * each
    signals = [signal.SIGUSR1, signal.SIGTERM] * (len(moments) // 2)
    random.shuffle(signals)
    slow = callbacks(tmp_path, Orders={"folder": str(folder), "pace": 0.02}, Announce={"folder": str(folder)})
    layout = [*LAYOUTS["zero2 on 2"], *RHYTHM, "--trainer.max_steps", str(30 + 30 * each)]
    # First, so that what can be kept of a compilation is there: it is not to take longer than the bound.
    finished(tmp_path / "whole", *layout, base=COMPILED, output=tmp_path)
    for moment, number in zip(moments, signals, strict=True):
        for mark in folder.iterdir():
            mark.unlink()
        to = random.choice(["rank 0", "rank 1", "all"])
        told = f"{number.name} to {to} in {moment}"
        with Job(run, *layout, *slow, base=COMPILED, output=tmp_path) as job:
            wait_for_moment(moment, job, folder)
            began, ranks = time.monotonic(), job.processes()
            for rank, process in ranks.items():
                if to in ("all", f"rank {rank}") or rank not in ranks:
                    os.kill(process, number)
            if not any(to in ("all", f"rank {rank}") for rank in ranks):  # not started yet
                os.kill(job.process.pid, number)
            status = job.end(BOUND + 5)
            assert time.monotonic() - began < BOUND, told
            assert status == 128 + number, f"{told}:\n{job.output}"
        for path in RunFolder(run).checkpoints() if run.exists() else []:
            read_checkpoint(path)
        if moment in ("save", "validation"):
            assert rows_of(run)[-1]["step"] == RunFolder(run).newest_checkpoint().step, told  # type: ignore[union-attr]
    finished(run, *layout, *slow, base=COMPILED, output=tmp_path)
    assert exact_rows(run) == exact_rows(tmp_path / "whole")


def test_without_scontrol_it_saves_and_says_so(tmp_path: Path) -> None:
    """As in a container; a task of an array; and with a handler that somebody else has set for the signal."""
    run = tmp_path / "run"
    slow = callbacks(tmp_path, Orders={"folder": str(tmp_path), "pace": 0.05}, OwnHandler={"folder": str(tmp_path)})
    variables = {"SLURM_JOB_ID": "11", "SLURM_STEP_ID": "0", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"}
    arguments = [*LAYOUTS["single"], *RHYTHM, "--trainer.max_steps", "400", *slow]
    with Job(run, *arguments, PATH="/nowhere", **variables) as job:
        job.wait_until_at(5)
        os.kill(job.process.pid, signal.SIGUSR1)
        assert job.end(BOUND) == 128 + signal.SIGUSR1
    step = rows_of(run)[-1]["step"]
    assert read_checkpoint(RunFolder(run).checkpoints()[-1]).step == step
    assert (tmp_path / "handled").exists()
    last = job.output.splitlines()[-1]
    assert f"is saved at step {step} of 400" in last
    assert "job 9_2 was not queued again: there is no scontrol on this machine" in last


def test_another_signal_announces_the_end_where_it_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = callbacks(tmp_path, Orders={"folder": str(tmp_path), "pace": 0.05})
    arguments = [*LAYOUTS["single"], *RHYTHM, "--trainer.max_steps", "400", *slow]
    with Job(run, *arguments, LLMSTACK_STOP_SIGNAL="SIGUSR2") as job:
        job.wait_until_at(5)
        os.kill(job.process.pid, signal.SIGUSR2)
        assert job.end(BOUND) == 128 + signal.SIGUSR2
    assert read_checkpoint(RunFolder(run).checkpoints()[-1]).step == rows_of(run)[-1]["step"]


def test_a_signal_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path / "run", LLMSTACK_STOP_SIGNAL="USR9") as job:
        assert job.end(60) == 2
    assert job.output == "llmstack: LLMSTACK_STOP_SIGNAL is USR9; it must name a signal, as USR1\n"
