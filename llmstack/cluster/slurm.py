"""Slurm's commands, and what the environment of a process says about its job."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from llmstack.errors import UserError

SECONDS = 60
"""A controller that has not answered by then is away."""


class SlurmError(UserError):
    """A command of Slurm is not there, does not answer, or has refused."""


def slurm(command: str, *arguments: str) -> str:
    """Output of a command of Slurm.

    Raises:
        SlurmError: with what it said.
    """
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise SlurmError(f"there is no {command} on this machine") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command} does not answer: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ended with {done.returncode}"]
        raise SlurmError(f"{command} {' '.join(arguments)}: {said[-1]}")
    return done.stdout


@dataclass(frozen=True)
class Job:
    """A Slurm job as one of its processes sees it."""

    id: str
    """As the commands take it: 12, or 12_3 for a task of an array."""
    restart: int
    """How often it was queued again before this start."""

    @classmethod
    def present(cls, environ: Mapping[str, str] = os.environ) -> Job | None:
        """The job that this process belongs to; None outside of Slurm."""
        if "SLURM_JOB_ID" not in environ:
            return None
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        if not restart.isdecimal():
            raise UserError(f"SLURM_RESTART_COUNT is {restart}; Slurm sets it to a number")
        return cls(f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"], int(restart))


def job_facts(job: str) -> dict[str, str]:
    """What the controller says of a job that it still knows: JobState, BatchFlag, Requeue, NodeList, Reason, …

    Raises:
        SlurmError: it knows none, or cannot be asked.
    """
    lines = slurm("scontrol", "show", "job", "--oneliner", job).splitlines()
    # Values may hold blanks and equal signs, names do not.
    fields = re.split(r"(?:^|\s)([A-Z][A-Za-z:/]*)=", lines[0] if lines else "")
    return dict(zip(fields[1::2], fields[2::2], strict=True))


def queue_state(job: str) -> tuple[str, str] | None:
    """State of a job that waits or runs, and why or where it does; None: it has ended.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    try:
        lines = slurm("squeue", "--noheader", "--jobs", job, "--format", "%T|%R", "--states=all").splitlines()
    except SlurmError as error:
        if "Invalid job id" in str(error):  # so long ago that it is forgotten
            return None
        raise
    for line in lines:
        state, _, where = line.strip().partition("|")
        if state in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "STOPPED"):
            return state, where
    return None
