"""Downstream evaluations that lie in a run's folder: what ``llmstack evaluate`` has written there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmstack.errors import UserError
from llmstack.reports.published import SIZES, published_size
from llmstack.reports.runs import EVALUATIONS

_FORMAT, _FORMAT_VERSION = "llmstack-evaluation", 1
_PERCENT = 100.0
_SAME_SIZE = 0.02


@dataclass(frozen=True)
class Score:
    """A metric of a task, in per cent."""

    values: tuple[float, ...]
    """One per few-shot seed; one alone where there are no few-shot examples, which seeds could change."""
    standard_error: float | None
    """Of the sample of documents."""


@dataclass(frozen=True)
class TaskResult:
    """A task or a group of tasks."""

    documents: int
    version: str
    """Of the task; empty for a group."""
    asked: str
    """Hash over documents, prompts (with their few-shot examples) and answers; empty for a group."""
    scores: dict[str, Score]
    """By metric."""


@dataclass(frozen=True)
class Setting:
    """What rows of one table have in common."""

    size: str
    """A published size, or the number of parameters of the first model of this size."""
    num_fewshot: int | None
    """None: each task's own."""
    limit: float | None
    """The first so many documents of each task; None: all."""
    weights: str | None
    """int8 or int4, where the matrices were stored so."""
    chat_template: str | None
    """Fingerprint, where questions were asked as a chat."""


@dataclass(frozen=True)
class Evaluation:
    """One file."""

    path: Path
    date: str
    step: int
    """Of the checkpoint."""
    parameters: int
    num_fewshot: int | None
    limit: float | None
    weights: str | None
    chat_template: str | None
    conditions: dict[str, str]
    """What else the scores may depend on, by name."""
    results: dict[str, TaskResult]
    """By the names of groups, and of those tasks that are in no group."""

    def setting(self, size: str) -> Setting:
        """Where it belongs; ``size`` as :func:`sizes` says."""
        return Setting(size, self.num_fewshot, self.limit, self.weights, self.chat_template)


def read_evaluations(run: Path) -> list[Evaluation]:
    """The evaluations in a run's folder, the latest of each setting and choice of tasks, oldest step first.

    Raises:
        UserError: a file is no evaluation, or of a format that this version does not know.
    """
    latest: dict[Any, Evaluation] = {}
    for path in sorted((run / EVALUATIONS).glob("tasks-*.json")):
        one = _read(path)
        kind = (one.setting(""), frozenset(one.results))
        latest[kind] = max(latest.get(kind, one), one, key=_age)
    return sorted(latest.values(), key=_age)


def sizes(evaluations: Iterable[Evaluation]) -> dict[int, str]:
    """Name of the size of each number of parameters: a published one, or that of the first within 2 %."""
    names: dict[int, str] = {}
    for count in (one.parameters for one in evaluations):
        near = (name for other, name in names.items() if abs(count - other) <= _SAME_SIZE * other)
        unpublished = (name for name in near if name not in SIZES)
        names.setdefault(count, published_size(count) or next(unpublished, _in_words(count)))
    return names


def _age(one: Evaluation) -> tuple[int, str]:
    return one.step, one.date


def _read(path: Path) -> Evaluation:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"its format is {record['format']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no evaluation ({_said(error)}); move it away") from error
    if record.get("format_version") != _FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {record.get('format_version')!r}, and this llmstack reads {_FORMAT_VERSION}: "
            "update it, or move the file away"
        )
    try:
        return _evaluation(path, record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a whole evaluation ({_said(error)}); move it away") from error


def _evaluation(path: Path, record: Mapping[str, Any]) -> Evaluation:
    checkpoint, model, fewshot = record["checkpoint"], record["model"], record["num_fewshot"]
    limit, weights, template = record["limit"], model["weights"], model["chat_template"]
    # A tokenizer may come with a template that was not used.
    in_chat = record.get("chat", template is not None)
    groups = {name: _result(group, fewshot) for name, group in record["groups"].items()}
    tasks = {name: _result(task, fewshot) for name, task in record["tasks"].items()}
    results = {
        name: result
        for name, result in {**tasks, **groups}.items()
        # A member is called after its group: mmlu_anatomy, and mmlu_stem, which is a group itself.
        if not any(name.startswith(f"{group}_") for group in groups)
    }
    return Evaluation(
        path=path,
        date=str(record["date"]),
        step=int(checkpoint["step"]),
        parameters=int(checkpoint["parameters"]),
        num_fewshot=None if fewshot is None else int(fewshot),
        limit=None if limit is None else float(limit),
        weights=None if weights is None else str(weights),
        chat_template=str(template) if in_chat else None,
        conditions={
            **{name: str(model[name]) for name in ("dtype", "max_length", "bos", "tokenizer")},
            "system instruction": str(record.get("system_instruction")),
            "lm_eval version": str(record["versions"]["lm_eval"]),
        },
        results=results,
    )


def _result(task: Mapping[str, Any], fewshot: int | None) -> TaskResult:
    zero_shot = task.get("num_fewshot", fewshot) == 0
    scores = {name: _score(metric, zero_shot) for name, metric in task["metrics"].items()}
    return TaskResult(int(task["documents"]), str(task.get("version", "")), str(task.get("hash", "")), scores)


def _score(metric: Mapping[str, Any], zero_shot: bool) -> Score:
    values = [_PERCENT * float(value) for value in metric["values"]]
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"values {metric['values']}")
    error = metric["stderr"]
    known = error is not None and math.isfinite(error)
    return Score(tuple(values[:1] if zero_shot else values), _PERCENT * float(error) if known else None)


def _in_words(parameters: int) -> str:
    """1234567 -> 1.23M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{letter}"
    return str(parameters)


def _said(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
