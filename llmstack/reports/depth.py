"""Pictures with depth on the x axis: the residual stream and what norms make of it, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from matplotlib.colors import Normalize

from llmstack.reports.runs import Array, Diagnostics, Series
from llmstack.reports.scene import Picture, Scene
from llmstack.reports.style import colour_bar, grid, label_edges, layer_axis, legend, scale_y, sequential, wrapped

_MOST_LINES = 40
"""Steps drawn in one panel: more cannot be told apart."""
_LAYER = "layer"


def magnitude(scene: Scene) -> Picture | None:
    """Mean |x| by layer over training, in the manner of Figure 3 of BHyT (arXiv 2601.09719)."""
    return _over_training(scene, "stream_mean_abs", "magnitude", "Magnitude by layer over training", "mean |x|")


def variance(scene: Scene) -> Picture | None:
    """Variance by layer over training, the other half of that figure."""
    return _over_training(scene, "stream_variance", "variance", "Variance by layer over training", "variance")


def last_step(scene: Scene) -> Picture | None:
    """All runs in one: the residual stream at the last step."""
    names = {
        "stream_mean_abs": "mean |x|",
        "stream_variance": "variance",
        "stream_max_abs": "max |x|",
        "stream_kurtosis": "kurtosis",
    }
    return _at_the_last_step(
        scene,
        names,
        "stream",
        "Residual stream at the last step",
        "By layer, for all runs, at the last step that each was diagnosed at. Kurtosis: 3 for Gaussian values; far "
        "above that, few channels carry most of the stream.",
    )


def special_tokens(scene: Scene) -> Picture | None:
    """rms of first-position and EOS tokens beside that of all tokens."""
    names = {
        "stream_rms": "rms of all tokens",
        "stream_first_token_rms": "rms of first tokens",
        "stream_eos_rms": "rms of EOS tokens",
    }
    if not scene.measured("stream_first_token_rms", "stream_eos_rms"):
        return None
    return _at_the_last_step(
        scene,
        names,
        "special_tokens",
        "First tokens and EOS tokens",
        "Root mean square of the residual stream by layer at the last step diagnosed: all tokens, those in the first "
        "position of a sequence, end-of-sequence tokens. One that stands far above the rest passes unscaled where "
        "a norm was tapered away.",
        share_y=True,
    )


def approximation(scene: Scene) -> Picture | None:
    """Exact and approximated mean square at BHyT's second site."""
    lines = {
        "variance_exact": ("exact", "black", "-"),
        "variance_approximated": ("approximated", "#D55E00", "--"),
        "variance_approximated_causal": ("approximated, causal constant", "#0072B2", ":"),
    }
    measured = scene.measured("variance_approximated")
    if not measured:
        return None
    figure, axes = grid(len(measured))
    drawn = []
    for axis, (run, diagnostics) in zip(axes, measured, strict=True):
        for name, (label, color, linestyle) in lines.items():
            profiles = diagnostics.profiles(name)
            if profiles:
                layers, values = profiles[max(profiles)]
                axis.plot(layers, values, color=color, linestyle=linestyle, marker=".", label=label)
                drawn.append(values)
        axis.set_title(wrapped(run.name))
        layer_axis(axis)
    scale_y(axes, drawn)
    label_edges(axes, _LAYER, "mean square at the MLP's norm")
    handles = {handle.get_label(): handle for axis in axes for handle in axis.get_lines()}
    figure.legend(handles.values(), [str(label) for label in handles], loc="outside lower center", ncols=3)
    return Picture(
        "variance_approximation",
        "Approximated and exact variance",
        "What the second site of a BHyT block divides by, at the last step diagnosed: the mean square of its input, "
        "and v1 + c_attn·λ1²/κ², which BHyT takes in its place; causal: with c_attn·T/t at position t.",
        figure,
        [run.name for run, _ in measured],
    )


def correlation(scene: Scene) -> Picture | None:
    """Pearson r of the approximation."""
    names = {"variance_pearson": "published constant", "variance_pearson_causal": "causal constant"}
    return _at_the_last_step(
        scene,
        names,
        "variance_pearson",
        "Correlation of approximated and exact variance",
        "Pearson r over tokens by layer at the last step diagnosed; 1: exact up to a factor and an offset. Causal: "
        "with the constant of the t tokens that position t attends to, not of all T.",
        share_y=True,
    )


def _over_training(scene: Scene, name: str, file: str, title: str, label: str) -> Picture | None:
    """One panel per run, one line per diagnosed step, coloured by step."""
    measured = scene.measured(name)
    if not measured:
        return None
    figure, axes = grid(len(measured))
    profiles = [diagnostics.profiles(name) for _, diagnostics in measured]
    norm = Normalize(0, max(max(steps) for steps in profiles))
    colours = sequential()
    for axis, (run, _), steps in zip(axes, measured, profiles, strict=True):
        for step in _thinned(list(steps)):
            axis.plot(*steps[step], color=colours(norm(step)), linewidth=1)
        axis.set_title(wrapped(run.name))
        layer_axis(axis)
    scale_y(axes, [values for steps in profiles for _, values in steps.values()])
    label_edges(axes, _LAYER, label)
    colour_bar(figure, axes, norm, "optimiser step")
    return Picture(
        file,
        title,
        f"{label[0].upper()}{label[1:]} of the residual stream: at layer l what block l reads (from 0), at the last "
        f"what the final norm reads. A line per diagnosed step (at most {_MOST_LINES}); all panels have one y axis.",
        figure,
        [run.name for run, _ in measured],
    )


def _at_the_last_step(
    scene: Scene, names: dict[str, str], file: str, title: str, text: str, *, share_y: bool = False
) -> Picture | None:
    """One panel per name, one line per run."""
    present = {name: label for name, label in names.items() if scene.measured(name)}
    if not present:
        return None
    figure, axes = grid(len(present), share_y=share_y, columns=2 if len(present) == 4 else 3, height=3.1)
    drawn: list[list[Array]] = []
    for axis, (name, label) in zip(axes, present.items(), strict=True):
        profiles = [(run, *_last_profile(diagnostics, name)) for run, diagnostics in scene.measured(name)]
        for run, layers, heights in profiles:
            look = scene.look(run)
            axis.plot(layers, heights, color=look.color, linestyle=look.linestyle, marker=".", markersize=4)
        drawn.append([heights for _, _, heights in profiles])
        axis.set_title(label)
        axis.set_xlabel(_LAYER)
        layer_axis(axis)
    for axis, values in zip(axes, drawn, strict=True):
        scale_y([axis], chain(*drawn) if share_y else values)
    shown = [run for run, _ in scene.measured(*present)]
    legend(figure, scene.entries(shown))
    return Picture(file, title, text, figure, [run.name for run in shown])


def _last_profile(diagnostics: Diagnostics, name: str) -> Series:
    profiles = diagnostics.profiles(name)
    return profiles[max(profiles)]


def _thinned(steps: Sequence[int]) -> list[int]:
    """At most so many of them, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_LINES)).round().astype(int)
    return [steps[place] for place in places]
