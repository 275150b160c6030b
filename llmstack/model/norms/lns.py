"""LayerNorm Scaling (arXiv 2502.05795, "The Curse of Depth"; code lmsdss/LayerNorm-Scaling).

    y = (1/sqrt(l)) · γ ⊙ x / rms(x),   l = 1 … L the number of the block, at both of its sites

The residual stream, the embedding and the final norm (RMSNorm) are untouched. The factor is not to be combined with
``initialisation: depth_scaled``, which cancels its benefit (the authors' README).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from llmstack.model.float32 import Float32Buffers
from llmstack.model.norms.folded import Affine, Folded
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.rmsnorm import BareRMSNorm, RMSNorm

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


class ScaledRMSNorm(Float32Buffers, nn.Module):
    """RMSNorm times 1/sqrt(``number``). The factor is a tensor, so that all blocks share one compiled graph.

    It multiplies the scale 1/rms(x), one number per token: the same as multiplying the output, and block 1 has RMSNorm
    to the last bit.
    """

    scale: Tensor

    def __init__(self, hidden_size: int, eps: float, number: int) -> None:
        super().__init__()
        self.eps, self.number = eps, number
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.register_buffer("scale", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1, the factor of the block."""
        nn.init.ones_(self.weight)
        nn.init.constant_(self.scale, self.number**-0.5)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale)
        return self.weight.to(x.dtype) * normed.to(x.dtype)

    def folded(self) -> Folded:
        """γ/sqrt(l) goes; RMSNorm's division stays."""
        # Beside a number alone, a bf16 γ would give a product in bf16.
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return Folded(BareRMSNorm(self.eps), Affine(wide * self.scale))


class FirstScaledRMSNorm(ScaledRMSNorm):
    """The same as a block's first site; the second has nothing to reuse."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (normalised, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return super().folded().as_first_site()


@dataclass(frozen=True)
class LayerNormScaling(NormMethod):
    """Pre-norm with RMSNorm, weaker with depth."""

    name: ClassVar[str] = "lns"

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstScaledRMSNorm(config.hidden_size, config.rms_norm_eps, layer + 1)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return ScaledRMSNorm(config.hidden_size, config.rms_norm_eps, layer + 1)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)
