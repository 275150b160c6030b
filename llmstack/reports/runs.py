"""Runs as a report sees them: what their folders hold, and which of them are the same but for the seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmstack.checkpoint.diagnostics import DiagnosticsRow
from llmstack.checkpoint.run_folder import RunFolder
from llmstack.errors import UserError

Array = npt.NDArray[np.float64]
Series = tuple[Array, Array]
"""x and y of a line."""
Place = tuple[int | None, str]
"""Layer and site of a diagnostic; None and "" where it has none."""

EVALUATIONS = "evaluation"
"""Folder in that of a run."""

_SEEDS = (("seed_everything",), ("model", "seed"), ("data", "seed"), ("run", "dir"))
_ASKED = tuple(("run", f"evaluate_{name}") for name in ("every", "tasks", "num_fewshot", "limit", "data_root"))
"""Where two configurations may differ and still be one setting."""


@dataclass(frozen=True)
class Diagnostics:
    """diagnostics.csv: per name and place, {step: value}; values that are not finite are left out."""

    values: dict[str, dict[Place, dict[int, float]]]

    @classmethod
    def of(cls, rows: Iterable[DiagnosticsRow]) -> Diagnostics:
        """From the rows of the file."""
        values: dict[str, dict[Place, dict[int, float]]] = {}
        for step, layer, site, name, value in rows:
            if math.isfinite(value):
                values.setdefault(name, {}).setdefault((layer, site), {})[step] = value
        return cls(values)

    def series(self, name: str) -> dict[Place, Series]:
        """Steps and values of ``name`` at each place, by layer."""
        places = self.values.get(name, {})
        return {place: _sorted_arrays(places[place]) for place in sorted(places, key=lambda p: (_depth(p), p[1]))}

    def profiles(self, name: str) -> dict[int, Series]:
        """By step: the layers at which ``name`` was measured, and its values there."""
        steps: dict[int, dict[int, float]] = {}
        for (layer, _), points in self.values.get(name, {}).items():
            for step, value in points.items():
                if layer is not None:
                    steps.setdefault(step, {})[layer] = value
        return {step: _sorted_arrays(steps[step]) for step in sorted(steps)}


@dataclass(frozen=True, eq=False)
class Run:
    """What a run folder holds, as far as a report is concerned."""

    name: str
    """Name of the folder."""
    path: Path
    config: dict[str, Any]
    metrics: dict[str, Array]
    """metrics.csv by column, one value per row; empty fields are NaN."""
    diagnostics: Diagnostics | None
    """None where nothing was diagnosed."""
    finished: bool
    evaluations: list[dict[str, Any]]
    """What was measured of it afterwards: the records that ``llmstack perplexity`` has written to its folder."""

    def points(self, column: str, over: str = "tokens_seen") -> Series:
        """``over`` and ``column`` of the rows that have both, infinite and NaN values left out."""
        x, y = self.metrics[over], self.metrics[column]
        known = np.isfinite(x) & np.isfinite(y)
        return x[known], y[known]

    @property
    def norm(self) -> str:
        """Name of the normalisation method."""
        return str(_at(self.config, ("model", "config", "norm", "method")) or "rmsnorm")

    @property
    def seed(self) -> int | None:
        """The run's one seed, where the configuration says it."""
        seed = self.config.get("seed_everything")
        return seed if isinstance(seed, int) else None

    @cached_property
    def setting(self) -> dict[str, Any]:
        """The configuration without its seeds, its folder, and what was asked of the model meanwhile."""
        setting = deepcopy(self.config)
        for *sections, key in (*_SEEDS, *_ASKED):
            section = _at(setting, sections)
            if isinstance(section, dict):
                section.pop(key, None)
        return setting


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed; often one alone."""

    label: str
    runs: list[Run]


def read_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: there is no run, it has no metrics, or one of its files is not what it should be.
    """
    folder = RunFolder(path)
    if not folder.path.is_dir():
        raise UserError(f"{path}: there is no such run folder")
    rows = folder.metrics.read()
    if not rows:
        raise UserError(f"{folder.metrics.path} has no rows: nothing to report of this run yet")
    diagnostics = folder.diagnostics.read()
    metrics = {column: np.array([row[column] for row in rows], dtype=np.float64) for column in rows[0]}
    return Run(
        name=folder.path.resolve().name,
        path=folder.path,
        config=folder.config,
        metrics=metrics,
        diagnostics=Diagnostics.of(diagnostics) if diagnostics else None,
        finished=folder.status == "finished",
        evaluations=list(_evaluations(folder.path / EVALUATIONS)),
    )


def _evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("perplexity-*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            yield {
                name: record[name] for name in ("dataset", "perplexity", "nats_per_token", "bits_per_byte", "tokens")
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no result of llmstack perplexity ({error!r}); move it away") from error


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read the run folders, in this order.

    Raises:
        UserError: as :func:`read_run`, or two have the same name.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        run = read_run(path)
        other = runs.setdefault(run.name, run)
        if other is not run:
            same = other.path.resolve() == run.path.resolve()
            raise UserError(
                f"{path} is given twice"
                if same
                else f"{other.path} and {path} are both called {run.name}; rename one, a report tells runs by name"
            )
    return list(runs.values())


def group_by_setting(runs: Sequence[Run]) -> list[Group]:
    """The runs by their configuration without seeds, in order of appearance."""
    settings: list[list[Run]] = []
    for run in runs:
        for members in settings:
            if members[0].setting == run.setting:
                members.append(run)
                break
        else:
            settings.append([run])
    names = [run.name for run in runs]
    return [Group(_label([run.name for run in members], names), members) for members in settings]


def _label(members: list[str], names: list[str]) -> str:
    """What the names have in common, ``*`` for the rest, if that fits no other name; else the first and the last."""
    if len(members) == 1:
        return members[0]
    head = _common_start(members)
    tail = _common_start([name[len(head) :][::-1] for name in members])[::-1]
    fits = [name for name in names if name.startswith(head) and name.endswith(tail)]
    return f"{head}*{tail}" if fits == members else f"{members[0]} … {members[-1]}"


def _common_start(texts: list[str]) -> str:
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in shared)


def _sorted_arrays(points: dict[int, float]) -> Series:
    keys = sorted(points)
    return np.array(keys, dtype=np.float64), np.array([points[key] for key in keys])


def _depth(place: Place) -> int:
    return -1 if place[0] is None else place[0]


def _at(values: Any, keys: Iterable[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values
