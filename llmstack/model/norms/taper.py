"""What all tapered norms share: a gate that removes the norm while the model trains (TaperNorm, arXiv 2602.10408).

    y = g·N(h) + (1 − g)·L(h)       N the norm, L a map of the same kind without statistics
    g(k) = 1                        k ≤ k_w
         = ½(1 + cos(π(k − k_w)/(k_t − k_w)))
         = 0                        k ≥ k_t

One gate for all sites and tokens. L is c·γ~⊙h (or c·γ~⊙(h − mean(h)) + β~), where c, one number per site, is the exact
least-squares fit of L to N, from moving averages (over optimiser steps, of means over all their tokens and ranks)
up to step k_w, and frozen there. γ~ and β~ start at k_w from γ and β, and are trained from there on.

γ~ is kept as γ at k_w (a buffer) plus an offset (a parameter, zero until then): the same training, and nothing has to
be copied into a parameter that a strategy may have sharded. A parameter that a phase does not use gets a zero gradient.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.float32 import Float32Buffers
from llmstack.model.norms.method import NOTHING, Gather, Observed, whole
from llmstack.model.norms.scale_anchor import AnchoredMethod, MovingAverage, decay_before

if TYPE_CHECKING:
    from llmstack.model.llama import Llama

Phase = Literal["norm", "taper", "linear"]


class _WithUnused(torch.autograd.Function):
    """The first argument as it is; the others, which it does not depend on, get gradients that are zero."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = [(tensor.shape, tensor.dtype, tensor.device) for tensor in unused]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.unused]
        return gradient, *zeros


def with_unused(y: Tensor, *unused: Tensor) -> Tensor:
    """``y``, bit for bit, in a graph that gives ``unused`` zero gradients: none at all would stop DDP and ZeRO."""
    return _WithUnused.apply(y, *unused) if torch.is_grad_enabled() else y


class TaperedSite(Float32Buffers, nn.Module):
    """One site: norm, linear map and gate. The branches at g = 1 and g = 0 are exact."""

    gate: Tensor
    c: Tensor
    origin: Tensor

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.offset = nn.Parameter(torch.empty(hidden_size))
        self.calibration = MovingAverage(2)
        self.register_buffer("gate", torch.empty(1))
        self.register_buffer("c", torch.empty(1))
        self.register_buffer("origin", torch.empty(hidden_size))
        self.phase: Phase = "norm"

    def reset_parameters(self) -> None:
        """γ = 1, the gate open, the linear map unknown."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.offset)
        nn.init.ones_(self.gate)
        nn.init.zeros_(self.c)
        nn.init.zeros_(self.origin)
        self.phase = "norm"

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """N(x), in the dtype of ``x``."""

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:
        """L(x) of ``x`` in fp32."""

    @abstractmethod
    def norm_parameters(self) -> list[Tensor]:
        """What N alone uses, as the linear map's :meth:`linear_parameters` are arranged."""

    @abstractmethod
    def linear_parameters(self) -> list[Tensor]:
        """What L alone uses."""

    def centre(self, x: Tensor) -> Tensor:
        """``x`` as the norm sees it: without its mean, where the norm takes that away."""
        return x

    def calibration_sums(self, x: Tensor) -> Tensor:
        """Over the tokens of ``x``: Σ ⟨L₁, N⟩, Σ ||L₁||² (L₁ is L with c = 1 and without β~) and their number, fp64."""
        centred = self.centre(x.to(torch.promote_types(x.dtype, torch.float32)))
        scale = (centred.pow(2).mean(-1) + self.eps).sqrt()
        energy = (self.weight.to(centred.dtype) * centred).pow(2).sum(-1)
        fit = torch.stack([(energy / scale).sum(dtype=torch.float64), energy.sum(dtype=torch.float64)])
        return torch.cat([fit, fit.new_tensor([energy.numel()])])

    @property
    def scale(self) -> Tensor:
        """c·γ~, [hidden] fp32."""
        return self.c * (self.origin + self.offset)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        if self.phase == "norm":
            return with_unused(self.norm(x), *self.linear_parameters())
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.phase == "linear":
            return with_unused(self.linear(wide).to(x.dtype), *self.norm_parameters())
        return (self.gate * self.norm(x).to(wide.dtype) + (1 - self.gate) * self.linear(wide)).to(x.dtype)

    def freeze(self) -> None:
        """Fix c from the calibration and let the linear map start from the norm, whose parameters must be whole."""
        numerator, denominator = self.calibration.value
        self.c.fill_(numerator / (denominator + 1e-12))
        self.origin.copy_(self.weight)

    def set_gate(self, gate: float) -> None:
        """``gate`` of the coming step, and the phase that it says."""
        self.gate.fill_(gate)
        self.phase = "norm" if gate == 1 else "linear" if gate == 0 else "taper"

    def refuse_half_removed(self) -> None:
        """Only the norm alone, or the linear map alone, can be folded.

        Raises:
            UserError: the gate is in between.
        """
        if self.phase == "taper":
            raise UserError(
                f"fold: the norms are being tapered (gate {float(self.gate):.3g}); fold a checkpoint from before the "
                "taper or from after its end"
            )


@dataclass(frozen=True)
class TaperMethod(AnchoredMethod):
    """The life of a tapered norm: calibration, gate, and, with ``scale_loss``, the scale of the last hidden state."""

    taper_start: float = 0.05
    """k_w as a share of all steps: the gate is 1 up to there (at least through the learning rate's warm-up)."""
    taper_end: float = 0.45
    """k_t as a share of all steps: the gate is 0 from there on (and should be for half of the training)."""
    calibration_decay: float | None = None
    """Decay of the moving averages, over optimiser steps, that c is taken from; null: 0.99, and a memory of at most a
    tenth of the steps before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.taper_start < self.taper_end <= 1:
            raise UserError(
                f"norm {self.name}: taper_start is {self.taper_start} and taper_end {self.taper_end}; they must be "
                "shares of the run, above 0, the end after the start"
            )
        if self.calibration_decay is not None and not 0 <= self.calibration_decay < 1:
            raise UserError(f"norm {self.name}: calibration_decay is {self.calibration_decay}; it must be in [0, 1)")

    def schedule(self, max_steps: int) -> tuple[int, int]:
        """k_w and k_t in optimiser steps."""
        start = max(round(self.taper_start * max_steps), 1)
        return start, max(round(self.taper_end * max_steps), start + 1)

    def gate(self, step: int, max_steps: int) -> float:
        """g of optimiser step ``step`` (from 1)."""
        start, end = self.schedule(max_steps)
        if step <= start:
            return 1.0
        if step >= end:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - start) / (end - start)))

    def anchor_step(self, max_steps: int) -> int:
        return self.schedule(max_steps)[0]

    def sites(self, model: Llama) -> dict[str, TaperedSite]:
        """The tapered sites by module name: those of the method's own blocks, and a tapered final norm."""
        own = [block.norm_method == self for block in model.blocks]
        places = {
            f"layers.{layer}.{name}": getattr(block, name)
            for layer, block in enumerate(model.blocks)
            if own[layer]
            for name in ("attention_norm", "mlp_norm")
        }
        if own[-1] and isinstance(model.norm, TaperedSite):
            places["norm"] = model.norm
        return places

    def observed(self, model: Llama, step: int, max_steps: int) -> dict[str, Observed]:
        """What c is fitted to, up to k_w."""
        wishes = super().observed(model, step, max_steps)
        if step <= self.schedule(max_steps)[0]:
            wishes |= {name: (site, site.calibration_sums) for name, site in self.sites(model).items()}
        return wishes

    @torch.no_grad()
    def after_step(
        self, model: Llama, step: int, max_steps: int, gather: Gather = whole, sums: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Calibrate up to k_w, freeze there, and give every site the gate of the next step."""
        super().after_step(model, step, max_steps, gather, sums)
        sites = self.sites(model)
        start, end = self.schedule(max_steps)
        if step <= start:
            decay = decay_before(start) if self.calibration_decay is None else self.calibration_decay
            for name, site in sites.items():
                site.calibration.update(sums[name][:2] / sums[name][2], decay)
        if step == start:
            for site in sites.values():
                with gather(site.norm_parameters()):
                    site.freeze()
        if start <= step < end:
            for site in sites.values():
                site.set_gate(self.gate(step + 1, max_steps))

    def settle(self, model: Llama) -> None:
        """The phase of every site, and whether the loss counts."""
        super().settle(model)
        for site in self.sites(model).values():
            site.set_gate(float(site.gate))
