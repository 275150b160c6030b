"""Sweeps: all points of a grid as one array job, and the best of them."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmstack.checkpoint import RunFolder
from llmstack.checkpoint.files import write_atomically
from llmstack.errors import UserError
from llmstack.shipped import find_config
from llmstack.yaml_files import read_yaml

POINTS_FILE = "points.json"
MOST_POINTS = 10_000


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    number: int
    chosen: dict[str, str]
    """On each axis: the arguments chosen there."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.number:04d}"

    def __str__(self) -> str:
        return f"{self.name} ({' '.join(self.chosen.values())})"

    @property
    def arguments(self) -> list[str]:
        """What it adds to the command."""
        return [argument for text in self.chosen.values() for argument in shlex.split(text)]


def read_sweep(name: str) -> list[Point]:
    """The points of a sweep's YAML file, the last axis running fastest.

    The file maps the name of each axis to a list of alternatives, each the arguments of ``fit`` that it stands for
    (``-c norm/bhyt.yaml``, ``--model.optimizer.lr 3e-4``).

    Raises:
        UserError: there is no such file, or it is none.
    """
    path = find_config(name)
    axes = read_yaml(path)
    if not isinstance(axes, dict) or not axes:
        raise UserError(f"{path} is no sweep: it must map the name of each axis to a list of alternatives")
    for axis, alternatives in axes.items():
        if not isinstance(alternatives, list) or not alternatives or not all(isinstance(a, str) for a in alternatives):
            raise UserError(
                f"{path}: {axis} must be a list of arguments, each a text, as ['--model.optimizer.lr 3e-4']"
            )
        for text in alternatives:
            try:
                shlex.split(text)
            except ValueError as error:
                raise UserError(f"{path}: {axis}: {text!r} cannot be read: {error}") from error
    count = math.prod(len(alternatives) for alternatives in axes.values())
    if count > MOST_POINTS:
        raise UserError(f"{path} has {count:,} points; {MOST_POINTS:,} at most")
    names = [str(axis) for axis in axes]
    grid = itertools.product(*axes.values())
    return [Point(number, dict(zip(names, chosen, strict=True))) for number, chosen in enumerate(grid)]


def write_points(folder: Path, points: Sequence[Point]) -> None:
    """Note in the sweep's folder what each of its runs is."""
    content = {point.name: point.chosen for point in points}
    write_atomically(folder / POINTS_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def points_in(folder: Path) -> list[Point] | None:
    """The points of the sweep in ``folder``; None: it holds none."""
    file = folder / POINTS_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [Point(int(name), dict(chosen)) for name, chosen in content.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not readable: {error}") from error


def results(folder: Path, points: list[Point]) -> Iterator[tuple[Point, float]]:
    """Each finished point whose last validation gave a number, with that loss (nats per token)."""
    for point in points:
        run = RunFolder(folder / point.name)
        if run.status != "finished":
            continue
        losses = [row["val_loss"] for row in run.metrics.read() if row["val_loss"] is not None]
        if losses and math.isfinite(losses[-1]):
            yield point, losses[-1]


def best_run(folder: Path) -> Path:
    """Folder of the point whose last validation loss is the lowest; of equals, the first.

    Raises:
        UserError: no sweep, or none of its points has finished with a validation.
    """
    points = points_in(folder)
    if points is None:
        raise UserError(f"{folder} holds no sweep (no {POINTS_FILE})")
    found = list(results(folder, points))
    if not found:
        raise UserError(f"{folder}: none of its {len(points)} points has finished with a validation")
    point, _ = min(found, key=lambda one: one[1])
    return folder / point.name
