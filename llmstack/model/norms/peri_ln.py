"""Peri-LN (Kim et al., arXiv 2502.02732): a norm on what each sub-layer reads, and one on what it gives.

    x = x + N_out(F(N_in(x)))     for attention and MLP, every N an RMSNorm with its own trained γ, γ0 = 1
    y = N(x_embedding)            ``embedding_norm``
    final norm: RMSNorm

Without the embedding norm it is Sandwich-LN. What a sub-layer adds has rms 1 at the start, so the variance of the
residual stream grows linearly with depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from llmstack.model.norms.rmsnorm import RMSNorm, RMSNormMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


@dataclass(frozen=True)
class PeriLN(RMSNormMethod):
    """RMSNorm around each sub-layer."""

    name: ClassVar[str] = "peri_ln"

    embedding_norm: bool = True
    """Normalise the embedding output, too."""

    def after_attention(self, config: ModelConfig, layer: int) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def after_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def after_embedding(self, config: ModelConfig) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps) if self.embedding_norm else nn.Identity()
