"""``llmstack requeue``: what a batch script does when its ranks have ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register ``requeue``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "requeue",
        help="queue a failed job of a run again (its script does)",
        description="Called by a batch script when srun has ended: queues the job again, unless the run has finished, "
        "was given something wrong (status 2), was cancelled, has come back too often or makes no progress. A job that "
        "was told to stop has done it itself; this does nothing then.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of the run")
    parser.add_argument("--status", type=int, required=True, metavar="N", help="exit status of srun")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Decide, say so, and do it."""
    from llmstack.cluster import after_step

    if said := after_step(Path(args.run_folder), args.status):
        print(f"llmstack: {said}", file=sys.stderr)
    return 0
