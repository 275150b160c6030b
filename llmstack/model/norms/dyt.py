"""Dynamic Tanh (arXiv 2503.10622; LLaMA form of jiachenzhu/DyT): no statistics at all.

    DyT(x) = γ ⊙ tanh(α·x)         at every site, the final one too; α one trained number per site
    DyT(x) = γ ⊙ tanh(α·x) + β     ``bias: true``, the authors' vision form

α starts at α0, which depends on the width and on the place: before attention, or elsewhere (MLP and final). The
embedding output is multiplied by one trained number that starts at sqrt(hidden_size). The published recipe decays every
parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.norms.folded import Affine, Folded, without_affine
from llmstack.model.norms.method import NormMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig

PUBLISHED_ALPHAS = {
    1024: (1.0, 1.0),
    2048: (1.0, 0.5),
    4096: (0.8, 0.2),
    5120: (0.6, 0.15),
    8192: (0.2, 0.05),
}
"""Width -> α0 before attention, and elsewhere (tables 10 and 11 of the paper; README of other_tasks/LLaMA)."""


def initial_alphas(width: int) -> tuple[float, float]:
    """α0 before attention, and elsewhere: the published values, between them a power law, beyond them constant."""
    widths = sorted(PUBLISHED_ALPHAS)
    upper = bisect_left(widths, width)
    if upper == len(widths) or upper == 0 or widths[upper] == width:
        return PUBLISHED_ALPHAS[widths[min(upper, len(widths) - 1)]]
    below, above = widths[upper - 1], widths[upper]
    part = math.log(width / below) / math.log(above / below)
    low, high = PUBLISHED_ALPHAS[below], PUBLISHED_ALPHAS[above]
    return low[0] * (high[0] / low[0]) ** part, low[1] * (high[1] / low[1]) ** part


class DyT(nn.Module):
    """γ ⊙ tanh(α·x), with β where asked for; the tanh in fp32."""

    def __init__(self, hidden_size: int, alpha: float, bias: bool) -> None:
        super().__init__()
        self.initial_alpha = alpha
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.alpha = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1, α = α0, β = 0."""
        nn.init.ones_(self.weight)
        nn.init.constant_(self.alpha, self.initial_alpha)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = self.weight.to(x.dtype) * torch.tanh(self.alpha.to(wide.dtype) * wide).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def folded(self) -> Folded:
        """γ and β go; α, inside the tanh, stays."""
        return Folded(without_affine(self, BareDyT), Affine(self.weight, self.bias))


class FirstDyT(DyT):
    """DyT as a block's first site; there is nothing to carry."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (bounded, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return super().folded()._replace(remains=without_affine(self, FirstBareDyT))


class BareDyT(DyT):
    """tanh(α·x): what remains when γ and β were folded away."""

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.tanh(self.alpha.to(wide.dtype) * wide).to(x.dtype)


class FirstBareDyT(BareDyT):
    """The same as a block's first site."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class EmbeddingScale(nn.Module):
    """One trained number times the embedding output."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.initial_scale = math.sqrt(hidden_size)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sqrt(hidden_size)."""
        nn.init.constant_(self.scale, self.initial_scale)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * self.scale.to(wide.dtype)).to(x.dtype)

    def folded_embedding(self, embedding: Tensor) -> Tensor:
        """The matrix that gives by itself what ``embedding`` [vocab, hidden] gives scaled."""
        wide = embedding.to(torch.promote_types(embedding.dtype, torch.float32))
        return (wide * self.scale.to(wide.dtype)).to(embedding.dtype)


@dataclass(frozen=True)
class DynamicTanh(NormMethod):
    """Bounded tanh without statistics in place of every norm."""

    name: ClassVar[str] = "dyt"

    alpha_attention: float | None = None
    """α0 before attention; null: the published value for the width (1.0 up to 2048, 0.8 at 4096, 0.2 at 8192)."""
    alpha_other: float | None = None
    """α0 before the MLP and the head; null: the same (1.0 up to 1024, 0.5 at 2048, 0.2 at 4096, 0.05 at 8192)."""
    bias: bool = False
    """Add β (the authors' vision models have it, their language models do not)."""
    decay_everything: bool = True
    """Weight decay on every parameter, α, γ and embedding scale included, as published; false: on matrices only."""

    def __post_init__(self) -> None:
        for option in ("alpha_attention", "alpha_other"):
            value = getattr(self, option)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"norm dyt: {option} is {value}; it must be above 0, and finite")

    def alphas(self, width: int) -> tuple[float, float]:
        """α0 before attention, and elsewhere, as configured or by width."""
        attention, other = initial_alphas(width)
        return self.alpha_attention or attention, self.alpha_other or other

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstDyT(config.hidden_size, self.alphas(config.hidden_size)[0], self.bias)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return DyT(config.hidden_size, self.alphas(config.hidden_size)[1], self.bias)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return DyT(config.hidden_size, self.alphas(config.hidden_size)[1], self.bias)

    def after_embedding(self, config: ModelConfig) -> nn.Module:
        return EmbeddingScale(config.hidden_size)

    def decayed(self, config: ModelConfig, name: str, parameter: Tensor) -> bool:
        return self.decay_everything or super().decayed(config, name, parameter)
