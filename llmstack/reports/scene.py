"""What all pictures of a report are drawn from, and what a picture is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from llmstack.reports.runs import Diagnostics, Group, Run, group_by_setting
from llmstack.reports.style import Look, looks


@dataclass(frozen=True)
class Scene:
    """The runs with their colours."""

    runs: list[Run]
    groups: list[Group]
    baseline: Run
    looks: dict[str, Look]
    """By label of the group."""

    @classmethod
    def of(cls, runs: list[Run], baseline: Run) -> Scene:
        """``baseline`` is one of ``runs``."""
        groups = group_by_setting(runs)
        return cls(runs, groups, baseline, looks(groups, next(g for g in groups if baseline in g.runs)))

    def look(self, run: Run) -> Look:
        """Of the setting that ``run`` belongs to."""
        return self.looks[next(group.label for group in self.groups if run in group.runs)]

    def entries(self, runs: Sequence[Run]) -> list[tuple[str, Look]]:
        """The legend of ``runs``."""
        shown = [group.label for group in self.groups if any(run in runs for run in group.runs)]
        return [(label, self.looks[label]) for label in shown]

    def measured(self, *names: str) -> list[tuple[Run, Diagnostics]]:
        """The runs whose diagnostics have one of ``names``."""
        return [
            (run, run.diagnostics)
            for run in self.runs
            if run.diagnostics is not None and any(name in run.diagnostics.values for name in names)
        ]


@dataclass(frozen=True)
class Picture:
    """A drawn picture and what to say about it."""

    name: str
    """File name without its ending."""
    title: str
    text: str
    """What a reader sees there, in plain text."""
    figure: Figure
    runs: list[str]
    """Names of the runs that are in it."""


Drawer = Callable[[Scene], Picture | None]
"""Draws one picture; None where no run has the numbers for it."""
