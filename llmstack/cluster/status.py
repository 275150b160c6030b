"""Where a run stands, from its folder and, where there is one, from Slurm."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmstack.checkpoint import RunFolder
from llmstack.checkpoint.lock import LOCK_FILE, is_locked
from llmstack.cluster.record import JobRecord
from llmstack.cluster.requeue import known_config, newest_step
from llmstack.cluster.slurm import SlurmError, job_facts, queue_state, slurm
from llmstack.cluster.sweep import POINTS_FILE
from llmstack.errors import UserError

RECENT_STEPS = 20
"""Steps whose median speed is shown."""

TAIL_BYTES = 100_000
"""Of a log, in which its last error is looked for."""


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run; None where it is not."""

    run: str
    state: str
    """queued, running, finished, stopped (nobody works on it), failed, or unknown (Slurm cannot be asked)."""
    reason: str
    job: str | None
    requeued: int
    step: int
    max_steps: int | None
    tokens: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoint: str | None
    error: str | None
    """Last line of an error in its logs, while it is not finished."""

    @property
    def line(self) -> str:
        """All in a line."""
        of = f" of {self.max_steps:,}" if self.max_steps else ""
        parts = [f"{self.state}{f' ({self.reason})' if self.reason else ''}", f"step {self.step:,}{of}"]
        if self.requeued:
            parts.append(f"requeued {self.requeued} time{'s' if self.requeued > 1 else ''}")
        if self.tokens is not None:
            parts.append(f"{self.tokens:,} tokens")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.val_loss is not None:
            parts.append(f"validation {self.val_loss:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.seconds_left is not None and self.state in ("running", "queued"):
            parts.append(f"{_duration(self.seconds_left)} of training left")
        parts.append(f"newest checkpoint {self.checkpoint}" if self.checkpoint else "no checkpoint")
        return f"{self.run}: {', '.join(parts)}" + (f"\n    {self.error}" if self.error else "")


def status_of(path: Path) -> RunStatus:
    """Look at a run without disturbing it.

    Raises:
        UserError: the folder holds no run, neither started nor submitted.
    """
    run, record = RunFolder(path), JobRecord(path)
    events = record.read()
    if run.status == "new" and not events:
        raise UserError(f"{path} holds no run")
    job = events[-1]["job"] if events else None
    of_job = [event for event in events if event["job"] == job]
    rows = run.metrics.read() if run.metrics.path.is_file() else []
    last: dict[str, Any] = rows[-1] if rows else {}
    speeds = [row["tokens_per_second"] for row in rows[-RECENT_STEPS:] if row["tokens_per_second"]]
    seconds = [row["step_seconds"] for row in rows[-RECENT_STEPS:] if row["step_seconds"]]
    max_steps = _max_steps(run)
    step = int(last.get("step", 0))
    state, reason = _state(run, job, of_job)
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    checkpoints = run.checkpoints()
    left = (max_steps - step) * statistics.median(seconds) if max_steps and seconds else None
    return RunStatus(
        run=str(path),
        state=state,
        reason=reason,
        job=job,
        requeued=max((event["restart"] + (event["event"] == "requeued") for event in of_job), default=0),
        step=step,
        max_steps=max_steps,
        tokens=last.get("tokens_seen"),
        loss=last.get("loss"),
        val_loss=losses[-1] if losses else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=left,
        checkpoint=checkpoints[-1].name if checkpoints else None,
        error=None if state == "finished" else _last_error(path),
    )


def _state(run: RunFolder, job: str | None, events: list[dict[str, Any]]) -> tuple[str, str]:
    if run.status == "finished":
        return "finished", ""
    if is_locked(run.path):
        return "running", f"job {job}" if events else ""
    last = next((event for event in reversed(events) if event["event"] == "ended"), None)
    if last is None or events[-1]["restart"] > last["restart"]:
        last = events[-1] if events else None
    if last is None:
        return "stopped", "the same command continues it"
    if last["event"] == "ended":
        return ("stopped" if "cancelled" in last["reason"] else "failed"), last["reason"]
    try:
        queued = queue_state(last["job"])
    except SlurmError as error:
        return "unknown", f"job {job}: {error}"
    if queued is not None:
        state, where = queued
        word = "queued" if state in ("PENDING", "REQUEUED") else "running"
        return word, f"job {job}: {where.strip('()') if word == 'queued' else state.lower()}"
    return "failed", f"job {job} is gone without a word; see {run.path / 'logs'}"


def _max_steps(run: RunFolder) -> int | None:
    trainer = known_config(run).get("trainer")
    steps = trainer.get("max_steps") if isinstance(trainer, dict) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def _last_error(path: Path) -> str | None:
    """The last line in the newest logs that says what went wrong."""
    logs = [log for log in (path / "logs").glob("slurm-*") if log.is_file()]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True)[:8]:
        with open(log, "rb") as file:
            file.seek(max(log.stat().st_size - TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            if line.startswith(("llmstack: ", "slurmstepd", "srun: error", "sbatch: error")) or "Error: " in line:
                return f"{log.name}: {line.strip()}"
    return None


def runs_below(folder: Path) -> Iterator[Path]:
    """Run folders directly in ``folder`` or in a sweep there, by name."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if RunFolder(path).config_path.is_file() or JobRecord(path).path.is_file():
            yield path
        elif (path / POINTS_FILE).is_file():
            yield from runs_below(path)


def cancel(path: Path, wait_seconds: float) -> str:
    """Have whoever trains the run save and end, and its job not come back; returns what became of it.

    Raises:
        UserError: nobody works on it, or not on this machine.
    """
    run, record = RunFolder(path), JobRecord(path)
    jobs = [event for event in record.read() if event["event"] in ("submitted", "started", "requeued")]
    job = jobs[-1]["job"] if jobs else None
    queued = queue_state(job) if job is not None else None
    if job is not None and queued is not None:
        # As Slurm counts: one that has just been queued again has not said so itself yet.
        restart = int(job_facts(job).get("Restarts", "0"))
        state, _ = queued
        record.add("ended", job, restart, reason="cancelled", step=newest_step(run))
        if state in ("PENDING", "REQUEUED", "CONFIGURING"):
            slurm("scancel", job)
            return f"job {job} waited and is gone; {_saved(run)}"
        # To the ranks, which note it whatever signal else announces their end.
        slurm("scancel", "--signal=TERM", job)
        if _ended(lambda: queue_state(job) is None, wait_seconds):
            return f"job {job} has ended; {_saved(run)}"
        return (
            f"job {job} has been told and still works after {wait_seconds:.0f} s; llmstack status {path} shows its end"
        )
    if not is_locked(path):
        raise UserError(f"{path}: nobody works on this run")
    holder = json.loads((path / LOCK_FILE).read_text(encoding="utf-8"))
    if holder.get("host") != socket.gethostname():
        raise UserError(f"{path} is trained by process {holder.get('pid')} on {holder.get('host')}: end it there")
    os.kill(int(holder["pid"]), signal.SIGTERM)
    if _ended(lambda: not is_locked(path), wait_seconds):
        return f"process {holder['pid']} has ended; {_saved(run)}"
    return f"process {holder['pid']} has been told and still works after {wait_seconds:.0f} s"


def _ended(condition: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


def _saved(run: RunFolder) -> str:
    step = newest_step(run)
    return f"saved at step {step}" if step else "it had saved nothing yet"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
