"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467) before each sub-layer and before the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from llmstack.model.norms.folded import Affine, Folded
from llmstack.model.norms.method import NormMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight`` ⊙ ``x`` / rms(``x``), [..., hidden] in the dtype of ``x``."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


class RMSNorm(nn.Module):
    """y = γ ⊙ x / sqrt(mean(x²) + eps), in the order of the Llama reference: fp32 statistics, cast, then γ."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def folded(self) -> Folded:
        """γ goes; the division stays."""
        return Folded(BareRMSNorm(self.eps), Affine(self.weight))


class FirstRMSNorm(RMSNorm):
    """RMSNorm as a block's first site; the second has nothing to reuse."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (normalised, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return super().folded().as_first_site()


class BareRMSNorm(nn.Module):
    """x / rms(x): what remains when γ was folded away."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def scale(self, x: Tensor) -> Tensor:
        """1/rms of each token of ``x`` [..., hidden], [..., 1] fp32 (or fp64 as it is)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        return (x * self.scale(x)).to(x.dtype)


@dataclass(frozen=True)
class RMSNormMethod(NormMethod):
    """Pre-norm with RMSNorm, as in Llama."""

    name: ClassVar[str] = "rmsnorm"

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstRMSNorm(config.hidden_size, config.rms_norm_eps)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)
