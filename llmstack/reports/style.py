"""How every picture of a report looks: colours that all readers tell apart, panels, axes, legends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from llmstack.reports.runs import Array, Group

RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "figure.dpi": 144,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.07,
    # A run may be called anything: no dollar sign begins a formula.
    "text.parse_math": False,
}
"""matplotlib's settings while a report is drawn."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, told apart with every kind of colour blindness; their black is the baseline's."""
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_WIDTH = 11.6
"""Inches."""
_LOG_FROM = 20.0
"""Ratio of the largest to the smallest value from which a logarithmic axis is taken."""
_PANEL_TEXT = 32
"""Characters of a panel's title, and of a legend's entry, that fit a line."""


@dataclass(frozen=True)
class Look:
    """Line of a setting."""

    color: str
    linestyle: Any


def looks(groups: Sequence[Group], baseline: Group) -> dict[str, Look]:
    """By label: black for the baseline; the others take the colours in order, then again with other dashes."""
    others = [group.label for group in groups if group is not baseline]
    found = {baseline.label: Look("black", "-")}
    for number, label in enumerate(others):
        found[label] = Look(_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)])
    return found


@cache
def sequential() -> Colormap:
    """Dark to bright for step or depth; the palest end, which white paper swallows, is left out."""
    return ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)))


def grid(panels: int, *, share_y: bool = True, columns: int = 4, height: float = 2.3) -> tuple[Figure, list[Axes]]:
    """A figure as wide as the page, with so many panels of this height in inches."""
    columns = min(columns, panels) if panels not in (5, 6, 9) else 3
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(6.5, 4.2) if panels == 1 else (_WIDTH, height * rows + 0.6))
    axes = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    flat = [axis for row in axes for axis in row]
    for axis in flat[panels:]:
        axis.remove()
    return figure, flat[:panels]


def label_edges(axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels at the left and at the lowest panel of each column, for panels that share their axes."""
    columns = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
    for number, axis in enumerate(axes):
        if number % columns == 0:
            axis.set_ylabel(y)
        if number + columns >= len(axes):
            axis.set_xlabel(x)


def wrapped(name: str, width: int = _PANEL_TEXT) -> str:
    """``name`` over as many lines as it needs; never shortened, since its end may be what tells it apart."""
    return "\n".join(textwrap.wrap(name, width)) or name


def scale_y(axes: Sequence[Axes], values: Iterable[Array]) -> None:
    """A logarithmic axis where all values are above 0 and span more than a factor of 20; plain numbers as ticks."""
    together = np.concatenate([np.asarray(part) for part in values])
    together = together[np.isfinite(together)]
    if together.size and together.min() > 0 and together.max() > _LOG_FROM * together.min():
        decades = math.log10(together.max() / together.min())
        for axis in axes:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3.2 else (1,), numticks=12))
            axis.yaxis.set_minor_locator(NullLocator())
    for axis in axes:
        axis.yaxis.set_major_formatter(FuncFormatter(_plain))


def layer_axis(axis: Axes) -> None:
    """A few ticks at whole layers."""
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def step_axis(axis: Axes, last: float) -> None:
    """All steps up to ``last``, with a few ticks at whole ones."""
    axis.set_xlim(0, 1.03 * last)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def marker(values: Array) -> str:
    """One point alone is no line."""
    return "." if values.size == 1 else ""


def colour_bar(figure: Figure, axes: Sequence[Axes], norm: Normalize, label: str) -> None:
    """What the colours of lines mean, right of ``axes``."""
    rows = axes[0].get_gridspec().nrows  # type: ignore[union-attr]
    mappable = ScalarMappable(norm, sequential())
    figure.colorbar(
        mappable,
        ax=list(axes),
        label=label,
        fraction=0.03,
        pad=0.01,
        aspect=max(15 * rows, 20),
        ticks=MaxNLocator(integer=True),
    )


def legend(figure: Figure, entries: Sequence[tuple[str, Look]]) -> None:
    """One entry per setting below the panels."""
    labels = [wrapped(label) for label, _ in entries]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, int(figure.get_figwidth() * 13 / (longest + 8)))
    figure.legend(
        [Line2D([], [], color=look.color, linestyle=look.linestyle) for _, look in entries],
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        handlelength=2.8,
    )


def token_axis(tokens: float) -> tuple[float, str]:
    """What to divide tokens by, and the label of the axis."""
    for unit, name in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if tokens >= 2 * unit:
            return unit, f"tokens seen ({name})"
    return 1.0, "tokens seen"


def _plain(value: float, position: int | None = None) -> str:
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.6g}"
