"""Running tasks, and what is written down of them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lm_eval
import torch

from llmstack import __version__
from llmstack.accounting.parameters import count_parameters
from llmstack.checkpoint import Source
from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.errors import UserError
from llmstack.evaluation.harness import HarnessModel
from llmstack.evaluation.settings import Settings
from llmstack.evaluation.tasks import OfflineTasks

FOLDER = "evaluation"
"""In a run: where its results lie, and `llmstack report` reads them."""
FORMAT, FORMAT_VERSION = "llmstack-evaluation", 1


@dataclass(frozen=True)
class Evaluated:
    """What came of it."""

    tasks: dict[str, Any]
    """By task: version, hash, num_fewshot, documents, notes, metrics."""
    groups: dict[str, Any]
    """By group: documents, metrics."""
    samples: dict[str, list[dict[str, Any]]]
    """By task: lm-eval's record of each document, for the first seed."""
    members: frozenset[str]
    """Tasks that belong to a group."""
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """Groups, and tasks that belong to none."""
        return self.groups | {name: one for name, one in self.tasks.items() if name not in self.members}


def evaluate(model: HarnessModel, manager: OfflineTasks, settings: Settings) -> Evaluated:
    """All tasks, once for each seed.

    Raises:
        UserError: lm-eval refuses a task or a setting.
    """
    began = time.perf_counter()
    runs = [_evaluate_once(model, manager, settings, seed) for seed in settings.fewshot_seeds]
    first, samples = runs[0], runs[0]["samples"]
    names = list(samples)
    tasks = {
        name: {
            "version": first["versions"].get(name),
            "hash": _hash_of(samples[name]),
            "num_fewshot": first["n-shot"].get(name),
            "documents": first["n-samples"][name]["effective"],
            "notes": manager.notes.get(name, []),
            "metrics": _metrics([run["results"][name] for run in runs]),
        }
        for name in names
    }
    subtasks = first["group_subtasks"]
    groups = {
        name: {
            "documents": sum(tasks[task]["documents"] for task in _members(name, subtasks, tasks)),
            "metrics": _metrics([run["groups"][name] for run in runs]),
        }
        for name in first.get("groups", {})
    }
    members = frozenset(task for name in groups for task in _members(name, subtasks, tasks))
    return Evaluated(tasks, groups, samples, members, time.perf_counter() - began)


def _evaluate_once(model: HarnessModel, manager: OfflineTasks, settings: Settings, seed: int) -> dict[str, Any]:
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(settings.tasks),
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            task_manager=manager,
            fewshot_random_seed=seed,
            apply_chat_template=settings.chat,
            system_instruction=settings.system_instruction,
            fewshot_as_multiturn=settings.fewshot_as_multiturn,
            log_samples=True,
        )
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(f"lm-eval: {error}") from error
    assert found is not None
    return dict(found)


def _metrics(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each metric over the seeds; lm-eval writes "name,filter" and "name_stderr,filter"."""
    found = {}
    for key, value in runs[0].items():
        name, comma, rule = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        values = [float(run[key]) for run in runs]
        errors = [run.get(f"{name}_stderr,{rule}") for run in runs]
        known = [float(error) for error in errors if isinstance(error, int | float)]
        found[name if rule == "none" else f"{name} ({rule})"] = {
            "mean": statistics.fmean(values),
            "stderr": statistics.fmean(known) if len(known) == len(runs) else None,
            "over_seeds": statistics.stdev(values) if len(values) > 1 else None,
            "values": values,
        }
    return found


def _members(name: str, subtasks: Mapping[str, Sequence[str]], tasks: Mapping[str, Any]) -> set[str]:
    """The tasks of a group, those of its own groups included."""
    if name in tasks:
        return {name}
    return {task for one in subtasks.get(name, ()) for task in _members(one, subtasks, tasks)}


def _hash_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over documents, prompts and targets: equal ones were asked the same."""
    parts = [one[key] for one in samples for key in ("doc_hash", "prompt_hash", "target_hash")]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def described(source: Source, ckpt: str) -> dict[str, Any]:
    """A checkpoint, for a record; ``ckpt`` is how it was asked for."""
    return {
        "ckpt": ckpt,
        "path": str(source.path),
        "sha256": source.content_hash,
        "step": source.checkpoint.step if source.checkpoint is not None else None,
        "parameters": count_parameters(source.config).total,
        "norm": source.config.norm_method.name,
    }


def record(
    evaluated: Evaluated,
    model: HarnessModel,
    checkpoint: Mapping[str, Any],
    settings: Settings,
    command: Sequence[str],
) -> dict[str, Any]:
    """The results file: plain JSON values. ``checkpoint`` is of the fields of :func:`described`."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "seconds": round(evaluated.seconds, 1),
        "checkpoint": dict(checkpoint),
        "model": model.described(),
        "versions": {
            "llmstack": __version__,
            "lm_eval": importlib.metadata.version("lm_eval"),
            "torch": torch.__version__,
            "datasets": importlib.metadata.version("datasets"),
        },
        "num_fewshot": settings.num_fewshot,
        "limit": settings.limit,
        "fewshot_seeds": list(settings.fewshot_seeds),
        "chat": settings.chat,
        "system_instruction": settings.system_instruction,
        "tasks": evaluated.tasks,
        "groups": evaluated.groups,
    }


def file_name(written: Mapping[str, Any]) -> str:
    """Of results within a run: the same for the same checkpoint and settings, other for others."""
    asked = [written[key] for key in ("num_fewshot", "limit", "fewshot_seeds", "chat", "system_instruction", "model")]
    digest = hashlib.sha256(json.dumps([asked, sorted(written["tasks"])]).encode()).hexdigest()[:8]
    return f"tasks-step-{written['checkpoint']['step']:08d}-{digest}.json"


def as_text(evaluated: Evaluated, settings: Settings) -> str:
    """A table: groups first, then tasks that belong to none."""
    rows = []
    for name, one in evaluated.summary.items():
        for metric, found in one["metrics"].items():
            spread = "" if found["over_seeds"] is None else f"± {found['over_seeds']:.4f}"
            error = "" if found["stderr"] is None else f"± {found['stderr']:.4f}"
            rows.append((name, metric, f"{found['mean']:.4f}", error, spread, f"{one['documents']:,}"))
    seeds = len(settings.fewshot_seeds)
    head = ("task", "metric", "mean", "sample", f"{seeds} seeds" if seeds > 1 else "", "documents")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in (head, *rows))
    ]
    lines.append("sample ±: standard error over the documents" + ("; seeds ±: standard deviation" if seeds > 1 else ""))
    return "\n".join(line.rstrip() for line in lines)


def first_requests(evaluated: Evaluated, model: HarnessModel) -> str:
    """The first document of each task as the model saw it, with ids."""
    lines = []
    for name, samples in evaluated.samples.items():
        for number, arguments in enumerate(samples[0]["arguments"]):
            lines.append(f"== {name}, first document, request {number + 1}")
            if len(arguments) == 2 and isinstance(arguments[1], str):
                context, continuation = model.encoded_pair(*arguments)
                lines += [f"{arguments[0]}⟦{arguments[1]}⟧", f"context {context}", f"continuation {continuation}"]
            else:
                lines += [str(arguments[0]), f"ids {model.tok_encode(arguments[0])}", *map(str, arguments[1:])]
    return "\n".join(lines)


def samples_text(samples: Sequence[Mapping[str, Any]]) -> str:
    """JSON lines, one for each document."""
    return "".join(json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in samples)


def write(path: Path, written: Mapping[str, Any]) -> None:
    """A results file, in a folder that is made if needed."""
    write_text(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """The same for any text."""
    with failing_in_one_line(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
