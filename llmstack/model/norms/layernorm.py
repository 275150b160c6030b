"""LayerNorm (Ba et al., arXiv 1607.06450) before each sub-layer and before the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmstack.model.norms.folded import Affine, Folded
from llmstack.model.norms.method import NormMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x`` [..., hidden], in its dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)


class LayerNorm(nn.Module):
    """y = γ ⊙ (x − mean(x)) / sqrt(var(x) + eps) + β, statistics in fp32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1, β = 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def folded(self) -> Folded:
        """γ and β go; centring and division stay."""
        return Folded(BareLayerNorm(self.eps), Affine(self.weight, self.bias))


class FirstLayerNorm(LayerNorm):
    """LayerNorm as a block's first site; the second has nothing to reuse."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (normalised, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return super().folded().as_first_site()


class BareLayerNorm(nn.Module):
    """(x − mean(x)) / sqrt(var(x) + eps): what remains when γ and β were folded away."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.layer_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype)


@dataclass(frozen=True)
class LayerNormMethod(NormMethod):
    """Pre-norm with LayerNorm, as in GPT-2."""

    name: ClassVar[str] = "layernorm"

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstLayerNorm(config.hidden_size, config.rms_norm_eps)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return LayerNorm(config.hidden_size, config.rms_norm_eps)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return LayerNorm(config.hidden_size, config.rms_norm_eps)
