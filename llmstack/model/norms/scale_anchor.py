"""The fixed-target scale loss (TaperNorm, arXiv 2602.10408, section on scale anchoring).

    L_aux = λ · mean over tokens of (s(h) − s_tgt)²      s(h) = sqrt(ms(h) + ε), or the standard deviation with ε

h is the residual stream before the final norm. Without a norm there, logits grow with h and training pays for longer
h ("logit chasing"); the loss pulls with 2λ(s − s_tgt)·h/(d·s) per token. s_tgt is the bias-corrected moving average of
the mean s over the optimiser steps before the start, and fixed from there on. Reported losses do not contain it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.float32 import Float32Buffers
from llmstack.model.norms.method import NOTHING, Gather, NormMethod, Observed, whole

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig
    from llmstack.model.llama import Llama

SCALE = "scale_anchor"
"""Name of what is observed."""


class MovingAverage(Float32Buffers, nn.Module):
    """Exponential moving average of vectors, zero at the start, with its bias corrected; saved with the weights."""

    total: Tensor
    weight: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(size))
        self.register_buffer("weight", torch.zeros(1))

    def reset_parameters(self) -> None:
        """Nothing seen."""
        nn.init.zeros_(self.total)
        nn.init.zeros_(self.weight)

    def update(self, value: Tensor, decay: float) -> None:
        """Take in one more value; what was there keeps the share ``decay``."""
        self.total.copy_(decay * self.total.double() + (1 - decay) * value.double())
        self.weight.copy_(decay * self.weight.double() + (1 - decay))

    @property
    def value(self) -> Tensor:
        """The average, fp64; NaN before the first update."""
        return self.total.double() / self.weight.double()


def decay_before(step: int) -> float:
    """Of an average that is frozen after ``step``: 0.99, or a memory of a tenth of the steps where that is shorter.

    Early in a training the residual stream grows from step to step: an average over all of them would be stale.
    """
    return min(0.99, max(0.0, 1 - 10 / step))


class ScaleAnchor(Float32Buffers, nn.Module):
    """The loss with its target."""

    target: Tensor

    def __init__(self, weight: float, eps: float, centred: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.centred = weight, eps, centred
        self.average = MovingAverage(1)
        self.register_buffer("target", torch.zeros(1))
        self.active = False
        """Whether the target is fixed and the loss counts."""

    def reset_parameters(self) -> None:
        """No target yet."""
        nn.init.zeros_(self.target)
        self.active = False

    def scale(self, hidden: Tensor) -> Tensor:
        """s of ``hidden`` [..., width] -> [...], fp32 (or fp64 as it is)."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        return (wide.pow(2).mean(-1) + self.eps).sqrt()

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss of ``hidden`` [batch, seq, hidden] -> scalar."""
        return self.weight * (self.scale(hidden) - self.target.to(hidden.device)).pow(2).mean()

    def observed(self, final_norm: nn.Module) -> Observed:
        """Sum of s over the tokens, and their number."""
        return final_norm, self._sums

    def _sums(self, hidden: Tensor) -> Tensor:
        scale = self.scale(hidden).double()
        return torch.stack([scale.sum(), scale.new_tensor(scale.numel())])

    def update(self, sums: Tensor, decay: float) -> None:
        """Take in the sums of one optimiser step."""
        self.average.update(sums[:1] / sums[1], decay)

    def fix(self) -> None:
        """From here on the target stands."""
        self.target.copy_(self.average.value)
        self.settle()

    def settle(self) -> None:
        """Whether a target was fixed, by the buffer."""
        self.active = bool(self.target > 0)


@dataclass(frozen=True)
class AnchoredMethod(NormMethod):
    """A method that can do without a final norm, and may hold the scale instead."""

    scale_loss: float = 0.0
    """λ of the loss that holds the scale of the last hidden state (published between 0.01 and 0.1); 0: none."""
    scale_decay: float | None = None
    """Decay of the moving average, over optimiser steps, that the target is taken from; null: 0.99, and a memory of at
    most a tenth of the steps before."""

    def __post_init__(self) -> None:
        if not 0 <= self.scale_loss < math.inf:
            raise UserError(f"norm {self.name}: scale_loss is {self.scale_loss}; it must be 0 or above")
        if self.scale_decay is not None and not 0 <= self.scale_decay < 1:
            raise UserError(f"norm {self.name}: scale_decay is {self.scale_decay}; it must be in [0, 1)")

    @abstractmethod
    def anchor_step(self, max_steps: int) -> int:
        """The optimiser step (at least 1) after which the target stands and the loss counts."""

    def scale_anchor(self, config: ModelConfig) -> ScaleAnchor | None:
        if self.scale_loss == 0:
            return None
        return ScaleAnchor(self.scale_loss, config.rms_norm_eps, self.centred)

    @property
    def centred(self) -> bool:
        """Whether the scale is a standard deviation, as LayerNorm's, and not a root mean square."""
        return False

    def own_anchor(self, model: Llama) -> ScaleAnchor | None:
        """That of ``model``, where the last block, which decides about it, has this method."""
        return model.scale_anchor if model.blocks[-1].norm_method == self else None

    def observed(self, model: Llama, step: int, max_steps: int) -> dict[str, Observed]:
        """The scale, until its target stands."""
        anchor = self.own_anchor(model)
        if anchor is None or step > self.anchor_step(max_steps):
            return {}
        return {SCALE: anchor.observed(model.norm)}

    def after_step(
        self, model: Llama, step: int, max_steps: int, gather: Gather = whole, sums: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Take the samples' scale in, and fix the target when it is time."""
        anchor = self.own_anchor(model)
        last = self.anchor_step(max_steps)
        if anchor is None or step > last:
            return
        anchor.update(sums[SCALE], decay_before(last) if self.scale_decay is None else self.scale_decay)
        if step == last:
            anchor.fix()

    def settle(self, model: Llama) -> None:
        """Whether the loss counts."""
        anchor = self.own_anchor(model)
        if anchor is not None:
            anchor.settle()
