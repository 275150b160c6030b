"""Whether a job that has stopped is queued again, and by whom: here, once, with the reason on record."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from llmstack.checkpoint import RunFolder
from llmstack.checkpoint.format import checkpoint_step
from llmstack.checkpoint.run_folder import parse_config
from llmstack.cluster.record import SLURM_FOLDER, SUBMITTED_CONFIG, JobRecord
from llmstack.cluster.script import seconds
from llmstack.cluster.slurm import Job, SlurmError, job_facts, slurm
from llmstack.errors import UserError

CONFIGURATION_ERROR = 2
"""Exit status of a command that was given something wrong; it would be no better the next time."""


BAD_NODES = "bad-nodes"
"""File in the run's Slurm folder, written by its checks: a name a line."""


@dataclass(frozen=True)
class Limits:
    """How often one job may come back; see ``RunConfig``."""

    max_requeues: int = 100
    max_stalled_requeues: int = 3

    @classmethod
    def of(cls, run: RunFolder) -> Limits:
        """Those of its configuration; the defaults where there is none yet, of a script that nobody has submitted."""
        options = known_config(run).get("run") or {}
        return cls(**{field.name: int(options.get(field.name, field.default)) for field in fields(cls)})


def requeue(path: Path, reason: str, without: Sequence[str] = ()) -> str:
    """Have Slurm queue this process's job again, unless there is a reason not to. Called when all is saved.

    Two callers cannot do it twice: the one in the training, and the script's own after it.

    Args:
        path: folder of the run.
        reason: why the job has stopped.
        without: nodes that it is not to run on again.

    Returns:
        What was done, or why not, as a sentence. The caller is about to be ended by Slurm if the job is to come back.
    """
    job = Job.present()
    if job is None:
        return "not under Slurm: the same command continues it"
    record, run = JobRecord(path), RunFolder(path)
    events = record.read(job.id)
    mine = [event for event in events if event["restart"] == job.restart and event["event"] in ("requeued", "ended")]
    if mine:
        return f"job {job.id} is already {'queued again' if mine[0]['event'] == 'requeued' else 'given up'}"
    step = newest_step(run)
    try:
        why_not = _why_not(run, job, events, step)
        if why_not is None:
            slurm("scontrol", "requeue", job.id)
    except SlurmError as error:
        # No event: where this was a container without Slurm's commands, the script outside tries again.
        return f"job {job.id} was not queued again: {error}; submit its script again to continue"
    if why_not is not None:
        record.add("ended", job.id, job.restart, reason=f"{reason}; {why_not}", step=step)
        return f"job {job.id} is not queued again: {why_not}"
    record.add("requeued", job.id, job.restart, reason=reason, step=step, without=list(without))
    if without:
        _exclude(job.id, without)
    return f"job {job.id} is queued again" + (f", without {', '.join(without)}" if without else "")


def note_start(path: Path) -> None:
    """Record that this process's job, if it is one, begins to train the run in ``path``."""
    if (job := Job.present()) is not None:
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
        JobRecord(path).add("started", job.id, job.restart, nodes=nodes, step=newest_step(RunFolder(path)))


def _why_not(run: RunFolder, job: Job, events: Sequence[dict[str, Any]], step: int) -> str | None:
    if run.status == "finished":
        return "the run is finished"
    facts = job_facts(job.id)
    if facts.get("BatchFlag") != "1":
        return "it is no batch job; the same command continues the run"
    if facts.get("Requeue") != "1":
        return "it was submitted with --no-requeue; submit its script again to continue"
    if _is_cancelled(facts):
        return "it was cancelled; submit its script again to continue"
    limits = Limits.of(run)
    if job.restart >= limits.max_requeues:
        return f"it has come back {job.restart} times, as often as run.max_requeues allows"
    # How far each start is known to have come; those that Slurm itself had queued again only as they began.
    reached = {
        event["restart"]: event["step"] for event in events if event["restart"] < job.restart and "step" in event
    }
    stalled = len(list(takewhile(lambda restart: reached[restart] == step, sorted(reached, reverse=True))))
    if stalled >= limits.max_stalled_requeues:
        times = "once" if stalled == 1 else f"{stalled} times"
        return f"it has come back {times} (run.max_stalled_requeues) and got no further than step {step}"
    return None


def _is_cancelled(facts: Mapping[str, str]) -> bool:
    """Whether Slurm is ending the job because somebody has asked it to.

    A job that is being ended is shown as COMPLETING, whatever for: out of time, preempted, or else cancelled.
    """
    if facts.get("JobState") == "RUNNING":
        return False
    limit, ran = facts.get("TimeLimit", ""), facts.get("RunTime", "0")
    is_out_of_time = limit[:1].isdigit() and seconds(ran) >= seconds(limit)
    return not is_out_of_time and facts.get("PreemptTime", "None") in ("None", "(null)")


def _exclude(job: str, nodes: Sequence[str]) -> None:
    """Nodes can be taken from a job that waits, which it does as soon as the requeue is accepted."""
    excluded = job_facts(job).get("ExcNodeList", "")
    names = [*([excluded] if excluded not in ("", "(null)") else []), *nodes]
    for _ in range(20):
        try:
            slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}")
            return
        except SlurmError:
            time.sleep(0.5)


def known_config(run: RunFolder) -> dict[str, Any]:
    """The configuration of a run, or of one that was submitted and has not begun; empty where there is neither.

    Raises:
        UserError: it cannot be read.
    """
    submitted = run.path / SUBMITTED_CONFIG
    if run.config_path.is_file():
        return run.config
    return parse_config(submitted.read_bytes(), submitted) if submitted.is_file() else {}


def newest_step(run: RunFolder) -> int:
    """Step of the newest checkpoint, good or not; 0: none."""
    return max((checkpoint_step(path) or 0 for path in run.checkpoints()), default=0)


def after_step(path: Path, status: int) -> str:
    """What the script does when its ``srun`` has ended with ``status``; returns what was done, "" for nothing.

    Raises:
        UserError: the folder cannot be read or written.
    """
    if not 0 <= status < 256:
        raise UserError(f"{status} is no exit status")
    if not path.is_dir():
        raise UserError(f"{path} is no run folder")
    if status == 0:
        return ""
    if status != CONFIGURATION_ERROR:
        return f"{path} {_describe(status)}: {requeue(path, _describe(status), bad_nodes(path))}"
    reason = f"ended with status {status}: what it was given is wrong, see its log"
    if (job := Job.present()) is not None:
        JobRecord(path).add("ended", job.id, job.restart, reason=reason, step=newest_step(RunFolder(path)))
    return f"{path} {reason}; it is not queued again"


def _describe(status: int) -> str:
    try:
        return f"was ended by {signal.Signals(status - 128).name}" if status > 128 else f"failed with status {status}"
    except ValueError:
        return f"failed with status {status}"


def bad_nodes(path: Path) -> list[str]:
    """Nodes of which a check has found broken devices since the run was submitted."""
    file = path / SLURM_FOLDER / BAD_NODES
    return sorted(set(file.read_text(encoding="utf-8", errors="replace").split())) if file.is_file() else []
