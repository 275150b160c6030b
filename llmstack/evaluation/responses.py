"""Answers of a model to requests, kept for the next time: an evaluation that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmstack.checkpoint.files import failing_in_one_line


class Responses:
    """A file of JSON lines for each rank; what stands in any of them is known.

    A line that a killed process left half-written is no answer. Nothing is locked: two evaluations may write at once.

    Args:
        folder: of the files; made if needed.
        identity: of everything that an answer depends on but the request. Others' answers are not seen.
        rank: of this process.
    """

    def __init__(self, folder: str | Path, identity: str, rank: int = 0) -> None:
        self._folder, self._identity = Path(folder), identity
        with failing_in_one_line(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Without a buffer each line is one write: those of two processes do not mix.
            self._file = (self._folder / f"{identity}.{rank}.jsonl").open("ab", buffering=0)
            # A line of its own, whatever the last process left.
            self._file.write(b"\n")

    def find(self, keys: Iterable[str]) -> dict[str, Any]:
        """Answers to those of ``keys`` that are known."""
        wanted, found = set(keys), {}
        for path in sorted(self._folder.glob(f"{self._identity}.*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    try:
                        key, answer = json.loads(line)
                    except (ValueError, TypeError):
                        continue
                    if isinstance(key, str) and key in wanted:
                        found[key] = answer
        return found

    def keep(self, key: str, answer: Any) -> None:
        """Write down an answer (plain JSON)."""
        self._file.write(json.dumps([key, answer]).encode() + b"\n")
