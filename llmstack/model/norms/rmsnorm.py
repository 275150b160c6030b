"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467) before each sub-layer and before the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from llmstack.model.norms.method import NormMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


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
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class FirstRMSNorm(RMSNorm):
    """RMSNorm as a block's first site; the second has nothing to reuse."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (normalised, None)."""
        return super().forward(x), None


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
