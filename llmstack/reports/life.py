"""Pictures with the optimiser step on the x axis: what norms and logits do while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from llmstack.reports.runs import Place, Series
from llmstack.reports.scene import Drawer, Picture, Scene
from llmstack.reports.style import (
    colour_bar,
    grid,
    label_edges,
    legend,
    marker,
    scale_y,
    sequential,
    step_axis,
    wrapped,
)

_STEP = "optimiser step"
_DASHES: dict[str, Any] = {
    "": "-",
    "attention": "-",
    "mlp": (0, (4, 1.5)),
    "final": (0, (6, 1.5, 1.2, 1.5)),
    "embedding": (0, (4, 1.5)),
    "head": (0, (1.2, 1.2)),
}
_SITE_NAMES = {"mlp": "MLP", "final": "final norm", "embedding": "embedding", "head": "final norm and head"}


def logit_scale(scene: Scene) -> Picture | None:
    """Whether a model chases logits: the scale of its last hidden state, its largest logit, the radial gradient."""
    names = {
        "scale_mean": "scale of the last hidden state, mean",
        "scale_p99": "the same, 99th percentile",
        "max_abs_logit": "largest |logit|",
        "radial_gradient": "radial gradient ⟨∇ℓ, h⟩ / ‖h‖",
    }
    present = {name: label for name, label in names.items() if scene.measured(name)}
    if not present:
        return None
    shown = [run for run, _ in scene.measured(*present)]
    figure, axes = grid(len(present), share_y=False, columns=2, height=2.9)
    for axis, (name, label) in zip(axes, present.items(), strict=True):
        drawn = []
        for run, diagnostics in scene.measured(name):
            look = scene.look(run)
            for steps, values in diagnostics.series(name).values():
                axis.plot(steps, values, color=look.color, linestyle=look.linestyle, marker=marker(values))
                drawn.append(values)
        axis.set_title(label)
        axis.set_xlabel(_STEP)
        step_axis(axis, max(run.metrics["step"][-1] for run in shown))
        scale_y([axis], drawn)
        if name == "radial_gradient":
            axis.axhline(0, color="#888888", linewidth=0.8, zorder=0)
    legend(figure, scene.entries(shown))
    return Picture(
        "logit_scale",
        "Logit scale",
        "s(h) = sqrt(mean h²) of what the final norm (or, where there is none, the head) reads; the largest logit; and "
        "how the loss changes where h only becomes longer. A model without a final norm and without scale loss can "
        "lower its loss by growing h: the radial gradient is then below 0, and scale and logits rise.",
        figure,
        [run.name for run in shown],
    )


def over_steps(name: str, title: str, label: str, text: str) -> Drawer:
    """A picture of ``name`` wherever it was measured: one panel per run, colour for depth, dashes for the site."""

    def draw(scene: Scene) -> Picture | None:
        measured = [(run, _merged(diagnostics.series(name))) for run, diagnostics in scene.measured(name)]
        if not measured:
            return None
        last = max(run.metrics["step"][-1] for run, _ in measured)
        places = [place for _, series in measured for place in series]
        norm = Normalize(0, max(*(layer or 0 for layer, _ in places), 1))
        figure, axes = grid(len(measured))
        for axis, (run, series) in zip(axes, measured, strict=True):
            for (layer, site), (steps, values) in series.items():
                color = "black" if layer is None else sequential()(norm(layer))
                style = _DASHES.get(site, "-")
                axis.plot(steps, values, color=color, linestyle=style, linewidth=1.2, marker=marker(values))
            axis.set_title(wrapped(run.name))
            step_axis(axis, last)
        scale_y(axes, [values for _, series in measured for _, values in series.values()])
        label_edges(axes, _STEP, label)
        if any(layer is not None for layer, _ in places):
            colour_bar(figure, axes, norm, "layer")
        _site_legend(figure, places)
        return Picture(name, title, text, figure, [run.name for run, _ in measured])

    return draw


def _merged(series: dict[Place, Series]) -> dict[Place, Series]:
    """One line of no place where all are the same (the gate of TaperNorm): they would hide each other."""
    first, *others = series.values()
    same = all(np.array_equal(first, other) for other in others)
    return {(None, ""): first} if others and same else series


def _site_legend(figure: Figure, places: Sequence[Place]) -> None:
    """What the dashes mean; black stands outside the blocks."""
    sites = {site: layer is None for layer, site in places if site}
    if sites:
        handles = [
            Line2D([], [], color="black" if outside else "#777777", linestyle=_DASHES.get(site, "-"))
            for site, outside in sites.items()
        ]
        names = [_SITE_NAMES.get(site, site) for site in sites]
        figure.legend(handles, names, loc="outside lower center", ncols=len(sites), handlelength=3.2)
