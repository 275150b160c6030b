"""``llmstack status`` and ``llmstack cancel``: where runs stand, and how to stop one."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from llmstack.cli.parsing import output_file
from llmstack.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Register ``status`` and ``cancel``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    status = subparsers.add_parser(
        "status",
        help="where a run stands",
        description="State, step, loss, speed, time left, newest checkpoint and last error of runs, from their folders "
        "and, where there is one, from Slurm.",
    )
    status.add_argument("run_folders", nargs="*", metavar="RUN", help="folder of a run or a sweep")
    status.add_argument("--all", action="store_true", help="all runs in the folder --root")
    status.add_argument("--root", default="runs", metavar="DIR", help="folder of runs (default: runs)")
    status.add_argument("--best", action="store_true", help="of a sweep: print the folder of its best run alone")
    status.add_argument("--output", type=output_file, metavar="F.json", help="also write everything to this file")
    status.set_defaults(run=run)
    stop = subparsers.add_parser(
        "cancel",
        help="save a run and stop it",
        description="Tells the run's job, or its process here, to save and end; the job does not come back. The run "
        "can be continued later.",
    )
    stop.add_argument("run_folder", metavar="RUN", help="folder of a run or a sweep")
    stop.add_argument("--wait", type=_seconds, default=120.0, metavar="S", help="seconds to wait for it (default: 120)")
    stop.set_defaults(run=cancel)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def run(args: argparse.Namespace) -> int:
    """Print a line a run."""
    from dataclasses import asdict

    from llmstack.checkpoint.files import write_atomically
    from llmstack.cluster.status import status_of
    from llmstack.cluster.sweep import best_run

    if args.best:
        if len(args.run_folders) != 1 or args.all:
            raise UserError("--best takes the folder of one sweep")
        print(best_run(Path(args.run_folders[0])))
        return 0
    found, faults = [], []
    for path in _paths(args):
        try:
            found.append(status_of(path))
            print(found[-1].line)
        except UserError as error:
            # One run that cannot be read does not hide the others.
            faults.append(str(error))
    if args.output is not None:
        write_atomically(args.output, json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if faults:
        raise UserError("; ".join(faults))
    return 0


def _paths(args: argparse.Namespace) -> list[Path]:
    from llmstack.cluster.status import runs_below
    from llmstack.cluster.sweep import points_in

    if args.all == bool(args.run_folders):
        raise UserError("give run folders, or --all")
    if args.all:
        paths = list(runs_below(Path(args.root)))
        if not paths:
            raise UserError(f"there are no runs in {args.root} (--root names another folder)")
        return paths
    paths = []
    for folder in map(Path, args.run_folders):
        points = points_in(folder)
        paths += [folder] if points is None else [folder / point.name for point in points]
    return paths


def cancel(args: argparse.Namespace) -> int:
    """Stop a run, or all of a sweep."""
    from llmstack.cluster import status
    from llmstack.cluster.sweep import points_in

    folder = Path(args.run_folder)
    points = points_in(folder)
    if points is None:
        print(status.cancel(folder, args.wait))
        return 0
    for path in (folder / point.name for point in points):
        try:
            if status.status_of(path).state in ("queued", "running"):
                print(f"{path}: {status.cancel(path, args.wait)}")
        except UserError as error:
            print(f"{path}: {error}")
    return 0
