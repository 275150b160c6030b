"""A report's folder: pictures, page and numbers, all of them or none."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from llmstack.checkpoint.files import failing_in_one_line, sync_file, sync_folder
from llmstack.errors import UserError
from llmstack.reports.catalogue import PICTURES
from llmstack.reports.evaluation_table import Table, evaluation_tables
from llmstack.reports.evaluation_text import comma_separated, latex, layout, markdown
from llmstack.reports.evaluations import read_evaluations
from llmstack.reports.page import Section, page
from llmstack.reports.runs import Run
from llmstack.reports.scene import Scene
from llmstack.reports.style import RC
from llmstack.reports.table import RunNumbers, group_numbers, run_numbers

PAGE = "report.html"
NUMBERS = "report.json"
EVALUATION_FILES: dict[str, Callable[[Sequence[Table]], str]] = {
    "evaluations.md": markdown,
    "evaluations.csv": comma_separated,
    "evaluations.tex": latex,
}
"""What the downstream tables are also written as."""
_OURS = {PAGE, NUMBERS, *EVALUATION_FILES, *(f"{name}.png" for name in PICTURES)}


def write_report(
    runs: list[Run], baseline: Run, folder: str | Path, report: Callable[[str], None] = lambda line: None
) -> list[RunNumbers]:
    """Write report.html, report.json, the pictures and, where the runs were evaluated, the downstream tables into
    ``folder``; an old report there is replaced.

    Args:
        runs: what to compare.
        baseline: one of them, which gaps are measured from.
        folder: new, empty, or a report.
        report: told the name of each picture before it is drawn.

    Returns:
        The rows of the table.

    Raises:
        UserError: the folder holds other things or cannot be written, or a file in a run is no evaluation; then it
            is as it was.
    """
    scene = Scene.of(runs, baseline)
    rows = [run_numbers(run, baseline) for run in runs]
    groups = group_numbers(scene.groups, baseline)
    tables = evaluation_tables(scene.groups, {run.name: read_evaluations(run.path) for run in runs})
    notes = list(_notes(runs, rows, baseline))
    with _replaced(Path(folder)) as partial:
        sections = list(_sections(scene, partial, report))
        evaluations = [{"run": run.name, **record} for run in runs for record in run.evaluations]
        text = page(rows, groups, baseline.name, notes, evaluations, [layout(table) for table in tables], sections)
        (partial / PAGE).write_text(text, encoding="utf-8")
        numbers = {
            "baseline": baseline.name,
            "runs": [asdict(row) for row in rows],
            "groups": [asdict(group) for group in groups],
            "evaluations": evaluations,
            "downstream": [asdict(table) for table in tables],
            "notes": notes,
            "pictures": [f"{section.name}.png" for section in sections],
        }
        text = json.dumps(_finite(numbers), indent=2, ensure_ascii=False, allow_nan=False)
        (partial / NUMBERS).write_text(text + "\n", encoding="utf-8")
        for name, written in EVALUATION_FILES.items() if tables else ():
            (partial / name).write_text(written(tables), encoding="utf-8")
    return rows


def check_folder(folder: Path) -> None:
    """Raise UserError unless a report may be written to ``folder``."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another folder for the report")
    foreign = sorted({entry.name for entry in folder.iterdir()} - _OURS) if folder.is_dir() else []
    if foreign:
        raise UserError(f"{folder} holds other things than a report ({foreign[0]}); choose another folder")


def _sections(scene: Scene, folder: Path, report: Callable[[str], None]) -> Iterator[Section]:
    with matplotlib.rc_context(RC):
        for name, draw in PICTURES.items():
            picture = draw(scene)
            if picture is None:
                continue
            report(f"{name}.png")
            png = _png(picture.figure)
            (folder / f"{name}.png").write_bytes(png)
            yield Section(name, picture.title, picture.text, png, picture.runs)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _notes(runs: list[Run], rows: list[RunNumbers], baseline: Run) -> Iterator[str]:
    """What a reader has to know before he compares."""
    reference = rows[runs.index(baseline)]
    for run, row in zip(runs, rows, strict=True):
        if run.diagnostics is None:
            yield f"{run.name} has no diagnostics (diagnostics.csv): it is in the table and the curves alone."
        if row.val_tokens is None:
            yield f"{run.name} was never validated."
        elif reference.val_tokens not in (None, row.val_tokens):
            yield (
                f"{run.name} was validated on {row.val_tokens:,} tokens, the baseline on {reference.val_tokens:,}: "
                "other data or another tokenizer, so the gap between them says nothing."
            )
        if row.tokens != reference.tokens:
            yield (
                f"{run.name} was trained on {_counted(row.tokens)} tokens, the baseline on "
                f"{_counted(reference.tokens)}; compare the curves, not the ends."
            )
        _, train = run.points("loss")
        if train.size and row.final_val_loss is not None and not row.final_val_loss <= train[0]:
            yield f"{run.name} has diverged: it ended at a higher loss than it began with."


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of ``folder`` at the end; after an error it is gone again."""
    check_folder(folder)
    target = folder.resolve()
    partial, old = (target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    with failing_in_one_line(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            yield partial
            for path in partial.iterdir():
                sync_file(path)
            # Somebody may have put something there meanwhile.
            check_folder(folder)
            _swap(partial, target, old)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _swap(new: Path, target: Path, old: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _counted(tokens: int | None) -> str:
    return "an unknown number of" if tokens is None else f"{tokens:,}"


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
