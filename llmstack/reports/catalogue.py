"""Every picture that a report can have, in the order of the page."""

from __future__ import annotations

from llmstack.reports import curves, depth, life
from llmstack.reports.scene import Drawer

_SITES = (
    " A line per site: colour for the layer, dashes for the place in it; black: outside the blocks, "
    "or the same at all sites."
)

PICTURES: dict[str, Drawer] = {
    "loss": curves.losses,
    "optimisation": curves.optimisation,
    "magnitude": depth.magnitude,
    "variance": depth.variance,
    "stream": depth.last_step,
    "special_tokens": depth.special_tokens,
    "gradient_norm": life.over_steps(
        "gradient_norm",
        "Gradient norms",
        "2-norm of the gradient",
        "Of all parameters of each block; of the embedding; of the final norm with an untied head. Before clipping.",
    ),
    "logit_scale": life.logit_scale,
    "gate": life.over_steps(
        "gate",
        "Gate",
        "gate g",
        "Share of the norm in g·norm + (1 − g)·linear map: 1 is the norm, 0 the linear map alone." + _SITES,
    ),
    "scale_ratio": life.over_steps(
        "scale_ratio",
        "Scale of the linear map against the norm",
        "c·r(h)",
        "Mean over tokens of what the linear map makes of a token's scale, over what the norm makes of it: 1 where "
        "both agree. Drift from 1 after the taper is what nothing holds any more." + _SITES,
    ),
    "frozen_scale": life.over_steps(
        "frozen_scale",
        "Frozen scales",
        "s̄",
        "What a switched FakeLN site divides every token by (before attention: on the path to queries and keys)."
        + _SITES,
    ),
    "frozen_scale_v": life.over_steps(
        "frozen_scale_v",
        "Frozen scales of the values",
        "s̄ of V",
        "The same on the path to the values." + _SITES,
    ),
    "lambda": life.over_steps("lambda", "λ", "λ", "Learned slope inside tanh(λ·x/(κ·s)) of BHyT and BHyT*." + _SITES),
    "alpha": life.over_steps("alpha", "α", "α", "Learned slope inside tanh(α·x) of DyT." + _SITES),
    "tanh_saturation": life.over_steps(
        "tanh_saturation",
        "Saturation of tanh",
        "share of |tanh| > 0.99",
        "Share of the values that a bounded norm has flattened: their gradients vanish." + _SITES,
    ),
    "variance_approximation": depth.approximation,
    "variance_pearson": depth.correlation,
    "attention_entropy": life.over_steps(
        "attention_entropy",
        "Entropy of attention",
        "nats",
        "Mean over heads and queries; 0: every query attends to one token alone.",
    ),
}
"""By the name of the file, without its ending."""
