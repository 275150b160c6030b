"""What may happen to a run of several ranks, and that it can go on afterwards as if it had not."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack.training.extension_builds import extensions_folder
from tests.e2e.job import LAYOUTS, Job, callbacks, exact_rows, finished, fit_here, lines_of, newest, rows_of

full = pytest.mark.full


SAMPLES = 4
"""A step, in every layout."""


# Gradients that are not finite.

POISONED = [3, 6, 7, 9]
"""Attempts at a step that one rank spoils: one, then as many in a row as end the run, then one after that."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    ["single", *(pytest.param(name, marks=full) for name in ("ddp on 2", "zero1 on 1", "zero2 on 2", "zero3 on 2"))],
)
def test_a_poisoned_step_leaves_no_trace(layout: str, tmp_path: Path) -> None:
    """On no rank, though one alone was hit; too many in a row end the run, and the same command goes on after them."""
    ranks = int(layout.split()[-1]) if " on " in layout else 1
    run = tmp_path / "run"
    accumulated = ["--data.micro_batch_size", str(2 // ranks), "--trainer.accumulate_grad_batches", "2"]
    faults = callbacks(tmp_path, Untouched={"folder": str(tmp_path)}, Poison={"rank": ranks - 1, "attempts": POISONED})
    rhythm = ["--trainer.max_steps", "8", "--run.checkpoint_every", "2", "--run.abort_after_skipped", "2"]
    arguments = [*LAYOUTS[layout], *accumulated, *rhythm, *faults]

    def fit() -> tuple[int, str]:
        if layout == "single":
            return fit_here(run, *arguments)
        with Job(run, *arguments) as job:
            return job.end(), job.output

    status, output = fit()
    assert status == 1, output
    assert output.count("2 steps in a row had no finite gradient") == 1
    assert "Traceback" not in output
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]
    assert newest(run).step == 4
    assert newest(run).state["skipped_steps"] == 3
    assert newest(run).state["samples_seen"] == SAMPLES * 7

    status, output = fit()
    assert status == 0, output
    assert [row["step"] for row in rows_of(run)] == list(range(1, 9))
    assert newest(run).state["skipped_steps"] == 4
    assert newest(run).state["samples_seen"] == SAMPLES * 12

    told = [(3, 8, 1, 1), (5, 20, 1, 2), (5, 24, 2, 3), (6, 32, 1, 4)]
    for line, (step, first, in_a_row, total) in zip(skips_of(run), told, strict=True):
        samples = ", ".join(str(sample) for sample in range(first, first + SAMPLES))
        assert f"step {step} skipped: its gradient is not finite" in line
        assert f"samples {samples} ({in_a_row} in a row, {total} in all)" in line
    # Compared at the attempt that follows, or at the end of the start.
    assert lines_of(tmp_path, "untouched", ranks) == [[[attempt, []] for attempt in POISONED]] * ranks


def skips_of(run: Path) -> list[str]:
    return [line for line in (run / "logs" / "events.log").read_text().splitlines() if "skipped" in line]


# Signals, deaths and a second start.

PACE = 0.05
"""Seconds that each step takes longer, so that there is time to aim."""

WHOLE = ["--trainer.max_steps", "60", "--run.checkpoint_every", "10", "--run.validate_every", "25"]


@pytest.mark.timeout(1500)
@full
@pytest.mark.parametrize("layout", ["ddp on 2", "zero2 on 2"])
def test_a_run_outlives_what_happens_to_its_ranks(layout: str, tmp_path: Path) -> None:
    """A spoilt step, signals, a second start on its folder, and kills: it ends like the run that had only the first."""
    arguments = [*LAYOUTS[layout], *WHOLE]
    spoil = {"rank": 1, "attempts": [3]}
    run, whole = tmp_path / "run", tmp_path / "whole"
    watched = callbacks(tmp_path, Poison=spoil, Orders={"folder": str(tmp_path), "pace": PACE})

    def start() -> Job:
        """Going on, and somewhat further than any start before."""
        before = len(rows_of(run))
        job = Job(run, *arguments, *watched)
        try:
            job.wait_until_at(before + random.randint(2, 8))
            time.sleep(random.uniform(0, 3 * PACE))
        except BaseException:
            job.kill()
            raise
        return job

    with start() as job:
        job.process.send_signal(signal.SIGTERM)
        assert_stopped(job)

    with start() as job:
        hold = tmp_path / "hold"
        hold.touch()
        with Job(run, *arguments, *watched) as second:
            assert second.process.wait(timeout=120) == 2
        (line,) = second.output.splitlines()
        assert f"in use by process {job.process.pid}" in line
        hold.unlink()
        job.wait_until_at(len(rows_of(run)) + 2)
        signal_all(job)
        assert_stopped(job)

    with start() as job:
        victim = job.processes()[1]
        os.kill(victim, signal.SIGKILL)
        assert job.end(60) == 1
        (line,) = job.said("rank 1 (")
        assert f"process {victim}) died" in line

    with start() as job:
        job.process.kill()
        assert job.end(60) == 128 + signal.SIGKILL

    finished(run, *arguments, *watched)
    finished(whole, *arguments, *callbacks(tmp_path, Poison=spoil, Untouched={"folder": str(tmp_path)}))
    assert lines_of(tmp_path, "untouched") == [[[3, []]]] * 2
    assert exact_rows(run) == exact_rows(whole)
    assert [row["step"] for row in rows_of(run)] == list(range(1, 61))
    for ended in (run, whole):
        assert newest(ended).state["skipped_steps"] == 1
        assert newest(ended).state["samples_seen"] == SAMPLES * 61
        (line,) = skips_of(ended)
        assert "step 3 skipped: its gradient is not finite; samples 8, 9, 10, 11 (1 in a row, 1 in all)" in line


def signal_all(job: Job) -> None:
    """SIGTERM to all ranks, in any order, 50 ms apart."""
    ranks = list(job.processes().values())
    for pid in random.sample(ranks, len(ranks)):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)


def assert_stopped(job: Job) -> None:
    """Within a minute, saved at the very step, said once."""
    assert job.end(60) == 143, job.output
    step = rows_of(job.run)[-1]["step"]
    assert newest(job.run).step == step
    (line,) = job.said(f"is saved at step {step} of ")
    assert "the same command continues it" in line
    assert "Traceback" not in job.output


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["ddp on 2", "zero2 on 2"])
def test_ten_signals_at_random_times(layout: str, tmp_path: Path) -> None:
    """To the first process, to the second, to both: also while the run starts, when there is nothing new to save."""
    run, steps = tmp_path / "run", 100_000
    rhythm = ["--trainer.max_steps", str(steps), "--run.checkpoint_every", "10", "--run.validate_every", "null"]
    arguments = [*LAYOUTS[layout], *rhythm]
    began = time.monotonic()
    with Job(run, *arguments) as job:
        job.wait_until_at(3)
        start_seconds = time.monotonic() - began
        job.process.send_signal(signal.SIGTERM)
        assert_stopped(job)
    for number in range(10):
        with Job(run, *arguments) as job:
            moment = random.uniform(0, 2 * start_seconds)
            time.sleep(moment)
            running = job.processes()
            victims = [[0], [1], random.sample([0, 1], 2)][number % 3]
            for pid in [running[rank] for rank in victims if rank in running] or [job.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                time.sleep(0.05)
            assert job.end(60) == 143, f"{victims} after {moment} s of {start_seconds}:\n{job.output}"
            assert "Traceback" not in job.output
            assert newest(run).step <= rows_of(run)[-1]["step"]
    with Job(run, *arguments) as job:
        job.wait_until_at(newest(run).step + 3)


@full
@pytest.mark.timeout(900)
def test_a_rank_that_ends_before_all_have_met_ends_the_others(tmp_path: Path) -> None:
    """The first would wait half an hour for the second to call."""
    with Job(tmp_path / "run", *LAYOUTS["ddp on 2"], *WHOLE) as job:
        job.wait_for(lambda: 1 in job.processes())
        victim = job.processes()[1]
        os.kill(victim, signal.SIGKILL)
        assert job.end(60) == 128 + signal.SIGKILL
        assert len(job.said(f"rank 1 (process {victim})")) == 1


@full
@pytest.mark.timeout(1200)
def test_a_stopped_rank_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with Job(tmp_path / "run", *LAYOUTS["ddp on 2"], *WHOLE) as job:
        job.wait_until_at(5)
        victim = job.processes()[1]
        os.kill(victim, signal.SIGSTOP)
        assert job.end(60) == 1
        (line,) = job.said("rank 1 (")
        assert f"process {victim}) died: no sign of life" in line


@full
@pytest.mark.timeout(1200)
def test_a_rank_that_hangs_is_named_with_the_place(tmp_path: Path) -> None:
    patience = 0.5
    faults = callbacks(tmp_path, Orders={"folder": str(tmp_path)})
    arguments = [*LAYOUTS["ddp on 2"], *WHOLE, "--run.hang_minutes", str(patience), *faults]
    with Job(tmp_path / "run", *arguments) as job:
        job.wait_until_at(12)
        victim = job.processes()[1]
        (tmp_path / "hang-1").touch()
        assert job.end(60 * patience + 30) == 1
        (line,) = job.said("rank 1 (")
        assert f"process {victim}) hangs: no progress" in line
        assert "faults.py" in job.output
    (tmp_path / "hang-1").unlink()
    assert newest(job.run).step == 10
    finished(tmp_path / "run", *arguments)


# The disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["ddp on 2", pytest.param("zero2 on 2", marks=full)])
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_what_was_saved(
    layout: str, tmp_path: Path, small_disk: Path
) -> None:
    """The same command goes on when there is room again, and does not begin where there is none."""
    run, filler = small_disk / "run", small_disk / "filler"
    orders = callbacks(tmp_path, Orders={"folder": str(tmp_path), "hold_at": 7})
    rhythm = ["--trainer.max_steps", "12", "--run.checkpoint_every", "4", "--run.validate_every", "null"]
    arguments = [*LAYOUTS[layout], *rhythm, *orders]
    (tmp_path / "hold").touch()
    with Job(run, *arguments, output=tmp_path) as job:
        job.wait_for(lambda: (run / "checkpoints" / "step-00000004").exists())
        leave_room(filler, 200_000)
        (tmp_path / "hold").unlink()
        assert job.end(60) == 2, job.output
    assert len(job.said("No space left on device")) == 1
    assert "Traceback" not in job.output
    assert newest(run).step == 4

    status, output = fit_here(run, *arguments)
    assert status == 2
    (line,) = output.splitlines()
    assert "checkpoints" in line
    assert "the disk has room for" in line

    filler.unlink()
    finished(run, *arguments, output=tmp_path)
    assert [row["step"] for row in rows_of(run)] == list(range(1, 13))
    assert newest(run).step == 12


def leave_room(filler: Path, size: int) -> None:
    """Fill the disk up to ``size`` bytes."""
    free = shutil.disk_usage(filler.parent).free
    filler.write_bytes(bytes(free - size))


# Extension builds.


@pytest.mark.timeout(900)
def test_a_killed_extension_build_does_not_hold_up_a_run(tmp_path: Path) -> None:
    """What such a build leaves: its signature, the baton and a library that may be half of one."""
    root = tmp_path / "extensions"
    folder = root / "deepspeed_shm_comm"
    # Where it has been built already, only the last step has to be repeated.
    for built in list(extensions_folder().glob(f"**/{folder.name}"))[:1]:
        shutil.copytree(built, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (root / f".llmstack-{folder.name}.lock").write_text("process 1 on another-host")
    (folder / "lock").touch()
    (folder / "deepspeed_shm_comm.so").write_text("half a library")
    arguments = [*LAYOUTS["zero1 on 1"], "--trainer.max_steps", "1"]
    job = finished(tmp_path / "run", *arguments, TORCH_EXTENSIONS_DIR=str(root), timeout=600)
    assert len(job.said(f"cleared {folder / 'lock'}")) == 1
    assert not (folder / "lock").exists()


@full
@pytest.mark.timeout(3600)
def test_a_run_killed_while_it_builds_extensions_can_be_started_again(tmp_path: Path) -> None:
    arguments = [*LAYOUTS["zero2 on 2"], "--trainer.max_steps", "2"]
    root = tmp_path / "extensions"
    baton = root / "deepspeed_shm_comm" / "lock"
    with Job(tmp_path / "run", *arguments, TORCH_EXTENSIONS_DIR=str(root)) as job:
        job.wait_for(baton.exists)
        time.sleep(random.uniform(0, 10))
        assert baton.exists()
        job.kill()
    assert baton.exists()
    job = finished(tmp_path / "run", *arguments, TORCH_EXTENSIONS_DIR=str(root), timeout=1200)
    assert len(job.said(f"cleared {baton}")) == 1
