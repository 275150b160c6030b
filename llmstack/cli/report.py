"""``llmstack report``: a table and pictures that compare runs, as one page."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.reports import Run


def add_parser(subparsers: Any) -> None:
    """Register ``report``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "report",
        help="tables and plots that compare runs",
        description="Losses with their gaps to a baseline, curves, and what the diagnostics saw inside the models: "
        "DIR/report.html (one page, nothing else needed), its pictures as PNG, its numbers as DIR/report.json. The "
        "evaluations in RUN/evaluation become tables on the page and in DIR/evaluations.md, .csv and .tex. Runs "
        "whose configurations differ in their seeds alone are shown as one setting.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; it may still be training")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the report; an older report there is replaced"
    )
    parser.add_argument(
        "--baseline", metavar="RUN", help="one of the runs, which gaps are measured from (default: the first)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report; raises UserError where a run or the folder is not fit for it."""
    if find_spec("matplotlib") is None:
        raise UserError("a report needs matplotlib: pip install 'llmstack[report]'")
    from llmstack.reports.runs import read_runs
    from llmstack.reports.table import digits
    from llmstack.reports.writing import PAGE, check_folder, write_report

    check_folder(Path(args.out))
    runs = read_runs(args.runs)
    baseline = _baseline(runs, args.baseline)
    rows = write_report(runs, baseline, args.out, report=lambda name: print(f"drawing {name} ...", file=sys.stderr))
    width = max(len(row.name) for row in rows)
    for row in rows:
        loss, gap = row.best_val_loss, None if row.name == baseline.name else row.best_gap
        said = "never validated" if loss is None else f"best validation loss {digits(loss, 4)}"
        print(f"{row.name:<{width}}  {said}" + (f" ({digits(gap.percent, 2, '+')} %)" if gap else ""))
    print(Path(args.out) / PAGE)
    return 0


def _baseline(runs: list[Run], wanted: str | None) -> Run:
    """By path or by name."""
    if wanted is None:
        return runs[0]
    for run in runs:
        if run.name == wanted or run.path.resolve() == Path(wanted).expanduser().resolve():
            return run
    raise UserError(f"--baseline {wanted} is none of the runs: {', '.join(run.name for run in runs)}")
