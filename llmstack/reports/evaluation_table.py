"""The numbers of the downstream tables: a row per setting of runs, a column per loss and task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from llmstack.reports.evaluations import Evaluation, Score, Setting, TaskResult, sizes
from llmstack.reports.published import NUM_FEWSHOT, PUBLISHED, SIZES, Printed, PublishedRow
from llmstack.reports.runs import Group, Run
from llmstack.reports.table import smoothing_window

CHANCE = {
    "arc_challenge": 25.0,
    "arc_easy": 25.0,
    "piqa": 50.0,
    "hellaswag": 25.0,
    "openbookqa": 25.0,
    "winogrande": 50.0,
    "mmlu": 25.0,
    "boolq": 50.0,
}
"""Per cent that guessing gets. The tasks of the BHyT paper, in the order of its tables."""

LOSSES = ("train_loss", "eval_loss", "ppl")
AVERAGE = "avg"

_NOISE = 2.0
"""Standard errors of a difference, below which it is none."""

SpreadOf = Literal["results", "sample", "published"]


@dataclass(frozen=True)
class Cell:
    """A number of a table; scores are in per cent."""

    mean: float
    spread: float | None
    """What stands behind ±."""
    spread_of: SpreadOf | None
    """results: sample standard deviation over them; sample: standard error of the sample of documents; published:
    what the paper prints."""
    results: int | None
    """How many the mean is over; None: published."""
    error: float | None
    """Standard error of the mean, as far as ``spread`` tells it."""
    sample_error: float | None
    """Standard error of the sample of documents."""
    best: bool = False
    """Better than all others in the column by more than the noise."""

    @classmethod
    def of(cls, values: Sequence[float], sample_error: float | None = None) -> Cell:
        """From the results. Where they are all the same (few documents), they tell no spread."""
        mean, count = statistics.fmean(values), len(values)
        if min(values) < max(values):
            deviation = statistics.stdev(values)
            return cls(mean, deviation, "results", count, deviation / math.sqrt(count), sample_error)
        kind: SpreadOf | None = None if sample_error is None else "sample"
        return cls(mean, sample_error, kind, count, sample_error, sample_error)

    @classmethod
    def printed(cls, number: Printed) -> Cell:
        """From the paper, which does not say what its ± is: no error follows from it."""
        return cls(number.mean, number.spread, None if number.spread is None else "published", None, None, None)


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seeds alone, or a published row."""

    label: str
    norm: str
    runs: list[str]
    """Names; empty: published."""
    steps: list[int]
    """Of the checkpoints."""
    cells: dict[str, Cell]
    """By column."""


@dataclass(frozen=True)
class Table:
    """Rows that may be compared."""

    setting: Setting
    plain: bool
    """acc throughout, not acc_norm where a task has it."""
    metrics: dict[str, str]
    """By task, in the order of the columns."""
    documents: dict[str, int]
    """By task; of the first row that has it."""
    averaged: list[str]
    """Tasks that the average is over."""
    rows: list[Row]
    """Ours, then the published."""
    published: list[int]
    """Numbers of the paper's tables that rows are from."""
    notes: list[str]
    """What a reader has to know, below the table."""

    @property
    def columns(self) -> list[str]:
        """Those that any row has a number in."""
        names = (*LOSSES, *self.metrics, AVERAGE)
        return [name for name in names if any(name in row.cells for row in self.rows)]


@dataclass(frozen=True)
class _Measured:
    """A run and its evaluations of one setting, oldest first."""

    run: Run
    evaluations: list[Evaluation] = field(default_factory=list)

    @cached_property
    def results(self) -> dict[str, TaskResult]:
        """Of each task the latest."""
        return {name: result for one in self.evaluations for name, result in one.results.items()}

    @property
    def steps(self) -> set[int]:
        """Of the checkpoints that :attr:`results` are of."""
        latest = {name: one.step for one in self.evaluations for name in one.results}
        return set(latest.values())

    def losses(self) -> Iterator[tuple[str, float]]:
        """As they were when the checkpoint was written; those that are not known, or not finite, are left out."""
        metrics, step = self.run.metrics, max(self.steps)
        until = metrics["step"] <= step
        train = metrics["loss"][until & np.isfinite(metrics["loss"])]
        if train.size:
            yield "train_loss", float(train[-smoothing_window(train.size) :].mean())
        validations = metrics["val_loss"][until & np.isfinite(metrics["val_tokens"])]
        if validations.size and math.isfinite(validations[-1]):
            loss = float(validations[-1])
            yield "eval_loss", loss
            if loss < 700:
                yield "ppl", math.exp(loss)


_Entry = tuple[Group, list[_Measured]]
"""What becomes a row."""


def evaluation_tables(groups: Sequence[Group], evaluations: Mapping[str, Sequence[Evaluation]]) -> list[Table]:
    """For each setting that was evaluated a table of acc_norm (acc where a task has no other), and one of acc alone
    where that is another.

    Args:
        groups: the runs.
        evaluations: by the name of the run, as ``read_evaluations`` gives them.
    """
    names = sizes(one for group in groups for run in group.runs for one in evaluations.get(run.name, ()))
    entries: dict[Setting, list[_Entry]] = {}
    for group in groups:
        measured: dict[Setting, dict[str, _Measured]] = {}
        for run in group.runs:
            for one in evaluations.get(run.name, ()):
                members = measured.setdefault(one.setting(names[one.parameters]), {})
                members.setdefault(run.name, _Measured(run)).evaluations.append(one)
        for setting, members in measured.items():
            entries.setdefault(setting, []).append((group, [*members.values()]))
    tables = []
    for setting, rows in entries.items():
        tables.append(_table(setting, rows, plain=False))
        if "acc_norm" in tables[-1].metrics.values():
            tables.append(_table(setting, rows, plain=True))
    return tables


def _table(setting: Setting, entries: Sequence[_Entry], plain: bool) -> Table:
    measured = [one for _, members in entries for one in members]
    metrics = _metrics(measured, plain)
    shown = _published(setting) if not plain else []
    averaged = [task for task in CHANCE if all(task in one.results and task in metrics for one in measured)]
    rows = [_row(group, members, metrics, averaged) for group, members in entries]
    guessed = _at_chance(rows)
    rows = _with_best(rows, guessed, averaged)
    documents = {task: next(one.results[task].documents for one in measured if task in one.results) for task in metrics}
    return Table(
        setting=setting,
        plain=plain,
        metrics=metrics,
        documents=documents,
        averaged=averaged,
        rows=[*rows, *(_printed_row(row, metrics, averaged) for row in shown)],
        published=sorted({row.table for row in shown}),
        notes=[*_notes(guessed), *_differences(measured, metrics), *_not_beside(setting, shown or plain)],
    )


def _metrics(measured: Sequence[_Measured], plain: bool) -> dict[str, str]:
    """By task: acc_norm where every run that has the task has it, else acc; tasks that have neither are left out."""
    names = {task for one in measured for task in one.results}
    order = [*(task for task in CHANCE if task in names), *sorted(names - CHANCE.keys())]
    found = {}
    for task in order:
        results = [one.results[task] for one in measured if task in one.results]
        for metric in ("acc",) if plain else ("acc_norm", "acc"):
            if all(metric in result.scores for result in results):
                found[task] = metric
                break
    return found


def _row(group: Group, members: Sequence[_Measured], metrics: Mapping[str, str], averaged: Sequence[str]) -> Row:
    cells = {}
    known = [dict(one.losses()) for one in members]
    for name in LOSSES:
        losses = [losses[name] for losses in known if name in losses]
        if losses:
            cells[name] = Cell.of(losses)
    for task, metric in metrics.items():
        scores = [one.results[task].scores[metric] for one in members if task in one.results]
        if scores:
            values = [value for score in scores for value in score.values]
            cells[task] = Cell.of(values, _mean_error(scores))
    if len(averaged) > 1:
        errors = [cells[task].sample_error for task in averaged]
        values = [
            value
            for one in members
            for value in _averages([one.results[task].scores[metrics[task]].values for task in averaged])
        ]
        cells[AVERAGE] = Cell.of(values, _error_of_mean(errors))
    steps = sorted(set().union(*(one.steps for one in members)))
    return Row(group.label, group.runs[0].norm, [one.run.name for one in members], steps, cells)


def _mean_error(scores: Sequence[Score]) -> float | None:
    errors = [score.standard_error for score in scores if score.standard_error is not None]
    return statistics.fmean(errors) if errors else None


def _averages(tasks: Sequence[Sequence[float]]) -> list[float]:
    """Over the tasks, per few-shot seed; a task without few-shot examples has one value for all seeds."""
    seeds = min((len(values) for values in tasks if len(values) > 1), default=1)
    return [statistics.fmean(values[seed if len(values) > 1 else 0] for values in tasks) for seed in range(seeds)]


def _error_of_mean(errors: Sequence[float | None]) -> float | None:
    """Of the mean over tasks, whose documents are independent samples."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if len(known) == len(errors) else None


def _with_best(rows: Sequence[Row], guessed: Sequence[str], averaged: Sequence[str]) -> list[Row]:
    """With the best cell of each column marked, where it leads each other by more than the noise.

    Of those who guess none is better: few-shot seeds of one run agree more than runs do, so that by them alone one
    often seems so.
    """
    best = {}
    none = {*guessed, AVERAGE} if set(averaged) <= set(guessed) else set(guessed)
    for name in {name for row in rows for name in row.cells} - none:
        order = sorted((row for row in rows if name in row.cells), key=lambda row: row.cells[name].mean)
        first, *others = order if name in LOSSES else order[::-1]
        if others and all(_apart(first.cells[name], other.cells[name]) for other in others):
            best[name] = first
    return [
        replace(row, cells={name: replace(cell, best=best.get(name) is row) for name, cell in row.cells.items()})
        for row in rows
    ]


def _apart(one: Cell, other: Cell) -> bool:
    if one.error is None or other.error is None:
        return False
    return abs(one.mean - other.mean) > _NOISE * math.hypot(one.error, other.error)


def _published(setting: Setting) -> list[PublishedRow]:
    """The paper's rows of this setting; after its fine-tuning it evaluates with a chat template."""
    if (setting.num_fewshot, setting.limit, setting.weights) != (NUM_FEWSHOT, None, None):
        return []
    return [row for row in PUBLISHED if (row.size, row.tuned) == (setting.size, setting.chat_template is not None)]


def _printed_row(row: PublishedRow, metrics: Mapping[str, str], averaged: Sequence[str]) -> Row:
    cells = {name: Cell.printed(row.numbers[name]) for name in (*LOSSES, *metrics) if name in row.numbers}
    if len(averaged) == len(CHANCE):
        cells[AVERAGE] = Cell.printed(row.numbers[AVERAGE])
    elif len(averaged) > 1:
        mean = statistics.fmean(row.numbers[task].mean for task in averaged)
        cells[AVERAGE] = Cell.printed(Printed(mean, None))
    return Row("published", row.method, [], [], cells)


def _at_chance(rows: Sequence[Row]) -> list[str]:
    """Tasks in which no row is more than two standard errors of the sample away from guessing."""
    cells = {task: [row.cells[task] for row in rows if task in row.cells] for task in CHANCE}
    return [task for task, found in cells.items() if found and all(_guesses(one, CHANCE[task]) for one in found)]


def _guesses(cell: Cell, chance: float) -> bool:
    return cell.sample_error is not None and abs(cell.mean - chance) <= _NOISE * cell.sample_error


def _notes(guessed: Sequence[str]) -> Iterator[str]:
    if guessed:
        said = ", ".join(f"{task} ({CHANCE[task]:g} %)" for task in guessed)
        yield f"At chance, every row within two standard errors of the sample, so nothing is bold: {said}."


def _differences(measured: Sequence[_Measured], metrics: Mapping[str, str]) -> Iterator[str]:
    """Why rows may not be as comparable as they look."""
    missing = sorted({task for one in measured for task in one.results} - metrics.keys())
    if missing:
        yield f"Not shown, since there is no such metric of them: {', '.join(missing)}."
    results = {task: [one.results[task] for one in measured if task in one.results] for task in metrics}
    other = [task for task, found in results.items() if len({(one.documents, one.version) for one in found}) > 1]
    if other:
        yield f"Not the same task in all rows (its documents or its version), so do not compare: {', '.join(other)}."
    asked = [task for task, found in results.items() if task not in other and len({one.asked for one in found}) > 1]
    if asked:
        yield f"Not asked in the same words, or with the same examples, in all rows: {', '.join(asked)}."
    conditions = [evaluation.conditions for one in measured for evaluation in one.evaluations]
    for name in conditions[0]:
        if len({condition[name] for condition in conditions}) > 1:
            yield f"Not all rows were evaluated with the same {name}."
    steps = {one.run.name: sorted(one.steps) for one in measured}
    if len({tuple(some) for some in steps.values()}) > 1 or any(len(some) > 1 for some in steps.values()):
        said = (f"{name} {' and '.join(map(str, some))}" for name, some in steps.items())
        yield f"Checkpoints of different steps: {', '.join(said)}."


def _not_beside(setting: Setting, shown: object) -> Iterator[str]:
    if setting.size in SIZES and not shown:
        yield (
            f"The paper's rows of this size are not shown: they are {NUM_FEWSHOT}-shot, over all documents, with "
            "weights as they were trained."
        )
