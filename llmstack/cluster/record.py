"""What became of the jobs of a run: ``slurm/jobs.jsonl`` in its folder, one line an event, only ever added to."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from llmstack.checkpoint.files import failing_in_one_line

SLURM_FOLDER = "slurm"

SUBMITTED_CONFIG = Path(SLURM_FOLDER) / "config.yaml"
"""In the folder of a submitted run: its complete configuration, before the run itself has written its own."""

Event = Literal["submitted", "started", "requeued", "ended"]
"""``ended``: for good, with a reason; the others explain themselves."""


class JobRecord:
    """The events of a run's jobs.

    Each is a mapping: ``time`` (UTC), ``event``, ``job`` and ``restart`` (which start of the job, from 0), and what
    belongs to the event: ``reason`` and ``step`` (of the newest checkpoint) where it was queued again or has ended.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / SLURM_FOLDER / "jobs.jsonl"

    def add(self, event: Event, job: str, restart: int = 0, **details: Any) -> None:
        """Write an event; it is on the disk when this returns.

        Raises:
            UserError: it cannot be written.
        """
        time = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": time, "event": event, "job": job, "restart": restart, **details}) + "\n"
        with failing_in_one_line(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write in append mode: lines of two nodes do not mix.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self, job: str | None = None) -> list[dict[str, Any]]:
        """All events, or those of one job, in order. A line that is none (a full disk has cut it) is left out."""
        if not self.path.is_file():
            return []
        events = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and _is_sound(event):
                events.append(event)
        return [event for event in events if job in (None, event["job"])]


def _is_sound(event: dict[str, Any]) -> bool:
    kinds = {"event": str, "job": str, "restart": int, "reason": str, "step": int, "nodes": str}
    needed = {"event", "job", "restart", *(("reason", "step") if event.get("event") in ("requeued", "ended") else ())}
    return needed <= event.keys() and all(isinstance(event[name], kinds[name]) for name in kinds.keys() & event.keys())
