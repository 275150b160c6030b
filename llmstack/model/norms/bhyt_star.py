"""BHyT*: bounded tanh with exact statistics at both sites (arXiv 2601.09719; released code of MLAI-Yonsei/BHyT).

    BHyT*(x) = γ ⊙ tanh( λ·x / (κ·sqrt(ms(x) + 1e-6)) )             released form, the default
    BHyT*(x) = γ ⊙ tanh( λ·x / (κ·sqrt(var(x) + 1e-6) + |mean(x)|) )  paper's form, ``mu_term: true``

κ comes from Chebyshev's bound P(|X−μ| ≤ κs) ≥ 1 − 1/κ²: κ = 10 for 99 %. The released code's schedules over
the blocks l = 1 … L, off by default there, too: κ/sqrt(l), κ·sqrt(l), κ·l^(1/4); the final norm has κ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.float32 import Float32Buffers
from llmstack.model.norms.folded import Affine, Folded, without_affine
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.rmsnorm import RMSNorm

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig

EPS = 1e-6
KappaSchedule = Literal["constant", "inverse_sqrt", "sqrt", "fourth_root"]
_POWERS: dict[KappaSchedule, float] = {"constant": 0.0, "inverse_sqrt": -0.5, "sqrt": 0.5, "fourth_root": 0.25}
Statistics = tuple[Tensor, Tensor | None]
"""(ms(x), None), or (var(x), mean(x)) with the |μ| term; each [batch, seq, 1] fp32."""


class BoundedTanh(Float32Buffers, nn.Module):
    """γ ⊙ tanh((λ/κ)·x / s) with the scale s from exact statistics of x, all but the product with γ in fp32."""

    lam: Tensor
    kappa: Tensor

    def __init__(self, hidden_size: int, lam: float, kappa: float, trainable: bool, mu_term: bool) -> None:
        super().__init__()
        self.initial_lam, self.initial_kappa, self.mu_term = lam, kappa, mu_term
        self.weight = nn.Parameter(torch.empty(hidden_size))
        # A fixed λ is a buffer: no optimiser, no weight decay and no `requires_grad_` can ever move it.
        if trainable:
            self.lam = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer("lam", torch.empty(1))
        self.register_buffer("kappa", torch.empty(1), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1, λ as configured."""
        nn.init.ones_(self.weight)
        nn.init.constant_(self.lam, self.initial_lam)
        nn.init.constant_(self.kappa, self.initial_kappa)

    def statistics(self, x: Tensor) -> Statistics:
        """Exact statistics of ``x`` [batch, seq, hidden]: one reduction, two with the |μ| term."""
        wide = _wide(x)
        if not self.mu_term:
            return wide.pow(2).mean(-1, keepdim=True), None
        mean = wide.mean(-1, keepdim=True)
        return (wide - mean).pow(2).mean(-1, keepdim=True), mean

    def bounded(self, x: Tensor, statistics: Statistics) -> Tensor:
        """The tanh of ``x`` scaled by the given statistics."""
        spread, mean = statistics
        wide = _wide(x)
        if mean is None:
            argument = wide * (self.lam.to(wide.dtype) / self.kappa * torch.rsqrt(spread + EPS))
        else:
            argument = wide * self.lam.to(wide.dtype) / (self.kappa * torch.sqrt(spread + EPS) + mean.abs())
        return torch.tanh(argument).to(x.dtype)

    def squash(self, x: Tensor, statistics: Statistics) -> Tensor:
        """γ ⊙ tanh of ``x`` scaled by the given statistics."""
        return self.weight.to(x.dtype) * self.bounded(x, statistics)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [batch, seq, hidden] -> the same shape and dtype."""
        return self.squash(x, self.statistics(x))

    def folded(self) -> Folded:
        """γ goes; λ, inside the tanh, stays."""
        return self.folded_into(BareBoundedTanh)

    def folded_into(self, kind: type[BareBoundedTanh]) -> Folded:
        """The same where ``kind`` remains."""
        bare = without_affine(self, kind)
        bare.settle()
        return Folded(bare, Affine(self.weight))


class FirstBoundedTanh(BoundedTanh):
    """BHyT* as a block's first site; the second measures for itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [batch, seq, hidden] -> (bounded, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return self.folded_into(FirstBareBoundedTanh)


class BareBoundedTanh(BoundedTanh):
    """The tanh alone: what remains when γ was folded away. What does not depend on x is computed once, in fp32."""

    ratio: Tensor
    """λ/κ."""

    def settle(self) -> None:
        """Compute the constants."""
        self.register_buffer("ratio", _wide(self.lam.detach()) / self.kappa, persistent=False)

    def bounded(self, x: Tensor, statistics: Statistics) -> Tensor:
        spread, mean = statistics
        if mean is not None:
            return super().bounded(x, statistics)
        return torch.tanh(_wide(x) * (self.ratio * torch.rsqrt(spread + EPS))).to(x.dtype)

    def squash(self, x: Tensor, statistics: Statistics) -> Tensor:
        return self.bounded(x, statistics)


class FirstBareBoundedTanh(BareBoundedTanh):
    """The same as a block's first site."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 as it is: squaring and reducing in bf16 would lose the statistics."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class BHyTStar(NormMethod):
    """Bounded tanh with exact statistics; the final norm is RMSNorm unless ``lambda_final`` is above 0."""

    name: ClassVar[str] = "bhyt_star"

    lambda_attention: float = 2.0
    """λ before attention."""
    lambda_mlp: float = 1.0
    """λ before the MLP."""
    lambda_final: float = 0.0
    """λ of a bounded final norm; 0: RMSNorm."""
    trainable_lambda: bool = True
    """Train the λ of each site, or keep them fixed."""
    kappa: float = 10.0
    """κ of Chebyshev's bound."""
    kappa_schedule: KappaSchedule = "constant"
    """κ of block l (from 1): the same in all; or κ/sqrt(l); κ·sqrt(l); κ·l^(1/4)."""
    mu_term: bool = False
    """Centre the statistic and add |mean(x)| to the scale (the paper's form)."""

    def __post_init__(self) -> None:
        for option in ("lambda_attention", "lambda_mlp", "kappa"):
            if not getattr(self, option) > 0:
                raise UserError(f"norm {self.name}: {option} is {getattr(self, option)}; it must be above 0")
        if not self.lambda_final >= 0:
            raise UserError(f"norm {self.name}: lambda_final is {self.lambda_final}; it must be 0 or above")

    def kappa_in(self, layer: int) -> float:
        """κ of block ``layer`` (from 0)."""
        return self.kappa * (layer + 1) ** _POWERS[self.kappa_schedule]

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstBoundedTanh(
            config.hidden_size, self.lambda_attention, self.kappa_in(layer), self.trainable_lambda, self.mu_term
        )

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return BoundedTanh(
            config.hidden_size, self.lambda_mlp, self.kappa_in(layer), self.trainable_lambda, self.mu_term
        )

    def final_norm(self, config: ModelConfig) -> nn.Module:
        if self.lambda_final == 0:
            return RMSNorm(config.hidden_size, config.rms_norm_eps)
        return BoundedTanh(config.hidden_size, self.lambda_final, self.kappa, self.trainable_lambda, self.mu_term)
