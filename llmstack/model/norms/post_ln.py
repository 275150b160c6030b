"""Post-LN (Vaswani et al., arXiv 1706.03762): the norm acts on the sum, and no final norm is needed.

    x = N(x + F(x))     for attention and MLP, N an RMSNorm

It needs a long warm-up and is unstable when deep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.rmsnorm import RMSNorm

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


@dataclass(frozen=True)
class PostLN(NormMethod):
    """RMSNorm on the sum of the residual stream and each sub-layer's output."""

    name: ClassVar[str] = "post_ln"

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return nn.Identity()

    def residual_scale(self, config: ModelConfig) -> float | None:
        return 1.0
