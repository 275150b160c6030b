"""What happens in a run apart from its numbers, one line each: on the screen and in ``logs/events.log``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.ranks import Ranks


class EventLog:
    """Written by rank 0; the others stay silent."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks

    def say(self, text: str) -> None:
        """Print ``text`` on stderr and add it, with the time (UTC), to the file.

        Raises:
            UserError: the file cannot be written.
        """
        if not self.ranks.is_first:
            return
        print(text, file=sys.stderr, flush=True)
        with failing_in_one_line(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
