"""DeepNorm (Wang et al., arXiv 2203.00555, "DeepNet"): Post-LN with a stronger residual and a weaker start.

    x = N(α·x + F(x))          α = (2L)^(1/4) for a decoder of L blocks; N an RMSNorm; no final norm
    W ~ N(0, g²·2/(fan_in + fan_out))     Xavier; g = β = (8L)^(−1/4) for V, O and the MLP, g = 1 for Q and K

Not as in the comparisons of the Mix-LN and LNS authors, whose code fixes α at 2.828 (right for L = 32 alone) and has
the gain (8L)^(+1/4). The embedding and the head start as the architecture's ``initialisation`` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from llmstack.errors import UserError
from llmstack.model.norms.post_ln import PostLN

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig

_WEAKER = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DeepNorm(PostLN):
    """Post-LN with a scaled residual and its own initialisation."""

    name: ClassVar[str] = "deep_norm"

    alpha: float | None = None
    """Factor on the residual; null: (2 num_layers)^(1/4)."""
    beta: float | None = None
    """Xavier gain of V, O and MLP; null: (8 num_layers)^(-1/4)."""

    def __post_init__(self) -> None:
        for option in ("alpha", "beta"):
            value = getattr(self, option)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"norm deep_norm: {option} is {value}; it must be above 0, and finite")

    def residual_scale(self, config: ModelConfig) -> float | None:
        return self.alpha or (2 * config.num_layers) ** 0.25

    def weight_std(self, config: ModelConfig, name: str, module: nn.Module) -> float | None:
        if not (name.startswith("layers.") and isinstance(module, nn.Linear)):
            return None
        beta = self.beta or (8 * config.num_layers) ** -0.25
        gain = beta if name.endswith(_WEAKER) else 1.0
        return gain * math.sqrt(2 / (module.in_features + module.out_features))
