"""Pictures of metrics.csv: losses over tokens, learning rate and gradient norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from llmstack.reports.runs import Array, Run, Series
from llmstack.reports.scene import Picture, Scene
from llmstack.reports.style import grid, legend, scale_y, token_axis
from llmstack.reports.table import smoothing_window

_EARLY = 0.2
"""Share of the tokens whose losses may lie above the picture."""


def losses(scene: Scene) -> Picture | None:
    """Training and validation loss, and the validation loss relative to the baseline's."""
    training = {run: run.points("loss") for run in scene.runs}
    validation = {run: run.points("val_loss") for run in scene.runs}
    gaps = {run: _gaps(run, scene.baseline) for run in scene.runs if run is not scene.baseline}
    titled = {"training loss": training, "validation loss": validation, "validation loss − baseline's": gaps}
    panels = {title: curves for title, curves in titled.items() if any(x.size for x, _ in curves.values())}
    figure, axes = grid(len(panels), share_y=False, height=3.6)
    unit = _label_tokens(scene, axes)
    highest = max(float(values[0]) for _, values in training.values() if values.size)
    low, high = _later_range([(x, _mean_around(y)) for x, y in training.values()], [*validation.values()], highest)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        axis.set_title(title)
        axis.set_ylim(low, high)
        for run, (tokens, values) in curves.items():
            if curves is training:
                _smoothed(axis, scene, run, "loss", unit, _mean_around)
            else:
                look = scene.look(run)
                axis.plot(tokens / unit, values, color=look.color, linestyle=look.linestyle, marker=".", markersize=4)
        if curves is gaps:
            axis.axhline(0, color="black", linewidth=1)
            axis.set_ylim(*_later_range([*gaps.values()], [(np.zeros(1), np.zeros(1))], high - low))
    axes[0].set_ylabel("nats per token")
    legend(figure, scene.entries(scene.runs))
    return Picture(
        "loss",
        "Losses",
        f"Cross-entropy over the tokens trained on; black is the baseline, {scene.baseline.name}. Pale: every logged "
        "step; bold: a mean over one step in fifty (10 at least) around it. Losses of the first fifth of the tokens, "
        "and those of a run that has diverged, may lie above the picture. The difference is taken at equal numbers of "
        "tokens: below 0 is better than the baseline.",
        figure,
        [run.name for run in scene.runs],
    )


def optimisation(scene: Scene) -> Picture | None:
    """Learning rate and gradient norm."""
    figure, axes = grid(2, share_y=False, height=3.2)
    unit = _label_tokens(scene, axes)
    axes[0].set_title("learning rate")
    axes[1].set_title("gradient norm before clipping")
    for run in scene.runs:
        look = scene.look(run)
        tokens, rates = run.points("learning_rate")
        axes[0].plot(tokens / unit, rates, color=look.color, linestyle=look.linestyle)
        _smoothed(axes[1], scene, run, "grad_norm", unit, _geometric_mean_around)
    scale_y(axes[:1], [np.zeros(1)])
    scale_y(axes[1:], [run.points("grad_norm")[1] for run in scene.runs])
    legend(figure, scene.entries(scene.runs))
    return Picture(
        "optimisation",
        "Learning rate and gradient norm",
        "The rate of each step; the 2-norm of the whole gradient before clipping (bold: geometric mean).",
        figure,
        [run.name for run in scene.runs],
    )


def _label_tokens(scene: Scene, axes: list[Axes]) -> float:
    most = max(float(np.nanmax(run.metrics["tokens_seen"])) for run in scene.runs)
    unit, label = token_axis(most)
    for axis in axes:
        axis.set_xlabel(label)
        axis.set_xlim(0, 1.02 * most / unit)
    return unit


def _smoothed(axis: Axes, scene: Scene, run: Run, column: str, unit: float, smooth: Callable[[Array], Array]) -> None:
    look = scene.look(run)
    tokens, values = run.points(column)
    faint = 0.3 if len(scene.runs) <= 4 else 0.12
    axis.plot(tokens / unit, values, color=look.color, linewidth=0.6, alpha=faint, zorder=1)
    axis.plot(tokens / unit, smooth(values), color=look.color, linestyle=look.linestyle)


def _mean_around(values: Array) -> Array:
    """Mean over the window around each value; at the ends over what there is of it."""
    half = smoothing_window(values.size) // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(values.size) - half, 0)
    last = np.minimum(np.arange(values.size) + half + 1, values.size)
    return (sums[last] - sums[first]) / (last - first)


def _geometric_mean_around(values: Array) -> Array:
    """For what spikes: one spike of 10 does not lift a window of 1s to 1.5."""
    return np.exp(_mean_around(np.log(np.maximum(values, np.finfo(float).tiny))))


def _gaps(run: Run, baseline: Run) -> Series:
    """Tokens at which both were validated, and the difference of the losses there."""
    tokens, values = run.points("val_loss")
    others = dict(zip(*(part.tolist() for part in baseline.points("val_loss")), strict=True))
    shared = np.array([at in others for at in tokens.tolist()], dtype=bool)
    return tokens[shared], values[shared] - np.array([others[at] for at in tokens[shared].tolist()])


def _later_range(first: list[Series], second: list[Series], highest: float) -> tuple[float, float]:
    """Limits that hold the curves after their first fifth, as far as they are not above ``highest``."""
    values = np.concatenate([y[x >= _EARLY * x[-1]] for x, y in [*first, *second] if x.size])
    values = values[values <= highest] if values.min() <= highest else values
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
