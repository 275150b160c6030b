"""Submitting a run: its folder, with all that a job needs, and the script that stands alone in it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmstack.checkpoint import RunFolder
from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.checkpoint.lock import FolderLock
from llmstack.checkpoint.run_folder import refuse_other_config
from llmstack.cluster.record import SLURM_FOLDER, SUBMITTED_CONFIG, JobRecord
from llmstack.cluster.requeue import BAD_NODES
from llmstack.cluster.script import Place
from llmstack.cluster.slurm import SlurmError, queue_state, slurm
from llmstack.cluster.snapshot import PACKAGES, installed_packages, snapshot_path, take_snapshot
from llmstack.cluster.sweep import Point, write_points
from llmstack.errors import UserError

FIT_SCRIPT, EVALUATION_SCRIPT = "fit.sh", "evaluate.sh"


@dataclass(frozen=True)
class Planned:
    """A run that is to be submitted."""

    path: Path
    config: Mapping[str, Any]
    """Complete, as plain values."""


def refuse_other(planned: Planned, free: Sequence[str]) -> None:
    """Refuse a folder that holds another run, or a finished one.

    Raises:
        UserError: say which.
    """
    run = RunFolder(planned.path)
    for folder in (run.path, *run.path.parents):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; choose another --run.dir")
    if run.config_path.is_file():
        refuse_other_config(run.path, "run.dir", run.config, planned.config, free)
    if run.status == "finished":
        raise UserError(f"{run.path} is finished: nothing to submit (another --run.dir starts another run)")


def refuse_busy(planned: Planned) -> None:
    """Refuse a folder whose job waits or runs.

    Raises:
        UserError: say which, or that Slurm cannot be asked.
    """
    jobs = [event["job"] for event in JobRecord(planned.path).read() if event["event"] == "submitted"]
    if jobs and queue_state(jobs[-1]) is not None:
        raise UserError(
            f"{planned.path}: job {jobs[-1]} of this run is waiting or running; cancel it first (llmstack cancel)"
        )


def place_of(root: Path, run: str, log: str) -> Place:
    """Where a job works that has its code in ``root``; ``run`` and ``log`` as in :class:`Place`."""
    code = snapshot_path(root / SLURM_FOLDER)
    return Place(run, log, Path.cwd(), code, sys.executable, os.environ.get("PYTHONPATH", ""))


def submit(
    root: Path, runs: Sequence[Planned], points: Sequence[Point] | None, scripts: Mapping[str, str]
) -> Iterator[str]:
    """Make the folder of a run, or of a sweep and its runs, and submit the scripts, each to begin after the one before.

    Yields:
        The number of each job.

    Raises:
        SlurmError: Slurm does not take one; the scripts are there to be mended.
        UserError: a job of a run waits or works, someone else is at work in the folder, or it cannot be written.
    """
    with failing_in_one_line(root):
        root.mkdir(parents=True, exist_ok=True)
    # Of two submissions at once one is refused.
    lock = FolderLock(root)
    try:
        for run in runs:
            refuse_busy(run)
        yield from _submitted(root, runs, points, scripts)
    finally:
        lock.release()


def _submitted(
    root: Path, runs: Sequence[Planned], points: Sequence[Point] | None, scripts: Mapping[str, str]
) -> Iterator[str]:
    for run in runs:
        write_run(run)
    with failing_in_one_line(root):
        for name in (SLURM_FOLDER, "logs"):
            (root / name).mkdir(exist_ok=True)
    take_snapshot(root / SLURM_FOLDER)
    if points is not None:
        write_points(root, points)
    files = [root / SLURM_FOLDER / name for name in scripts]
    for file, script in zip(files, scripts.values(), strict=True):
        write_atomically(file, script)
        file.chmod(0o755)
    job = None
    for file in files:
        job = _sbatch(file, after=job)
        if file.name == FIT_SCRIPT:
            # The tasks of an array are numbered as the runs are.
            for number, run in enumerate(runs):
                JobRecord(run.path).add("submitted", job if points is None else f"{job}_{number}")
        yield job


def write_run(planned: Planned) -> None:
    """Make the run's folder ready for its job: configuration, folder of the logs, list of packages."""
    folder = planned.path / SLURM_FOLDER
    with failing_in_one_line(planned.path):
        folder.mkdir(parents=True, exist_ok=True)
        (planned.path / "logs").mkdir(exist_ok=True)
    (folder / BAD_NODES).unlink(missing_ok=True)
    write_atomically(
        planned.path / SUBMITTED_CONFIG, yaml.safe_dump(dict(planned.config), sort_keys=False, allow_unicode=True)
    )
    write_atomically(folder / PACKAGES, installed_packages())


def _sbatch(file: Path, after: str | None) -> str:
    """Submit a script, to start when job ``after`` has ended well; its number."""
    waiting = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    answer = slurm("sbatch", "--parsable", *waiting, str(file))
    match = re.match(r"\d+", answer)
    if match is None:
        raise SlurmError(f"sbatch has answered {answer.strip()!r}, which is no job's number ({shlex.quote(str(file))})")
    return match[0]
