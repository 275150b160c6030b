"""Mix-LN (Li, Yin & Liu, arXiv 2412.13795; code pixeli99/MixLN): Post-LN below, Pre-LN above.

    x = N(x + F(x))     in the first a·L blocks, a = 1/4
    x = x + F(N(x))     in the others, with a final norm; every N an RMSNorm

The authors' code draws the embedding with standard deviation sqrt(2/5) (``embedding_std: 0.632``), that of the LNS
authors with 0.02; it is the architecture's ``initializer_range`` here unless set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from llmstack.errors import UserError
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.mixture import Mixture
from llmstack.model.norms.post_ln import PostLN
from llmstack.model.norms.rmsnorm import RMSNormMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


@dataclass(frozen=True)
class MixLN(Mixture):
    """The lower share of the blocks is Post-LN, the upper Pre-LN."""

    name: ClassVar[str] = "mix_ln"

    post_share: float = 0.25
    """Share of the blocks, from the first, that are Post-LN (3 of 12, 6 of 24); rounded to whole blocks."""
    embedding_std: float | None = None
    """Standard deviation of the initial embedding; null: the architecture's initializer_range."""

    def __post_init__(self) -> None:
        if not 0 <= self.post_share <= 1:
            raise UserError(f"norm mix_ln: post_share is {self.post_share}; it must be between 0 and 1")
        if self.embedding_std is not None and not 0 < self.embedding_std < math.inf:
            raise UserError(f"norm mix_ln: embedding_std is {self.embedding_std}; it must be above 0, and finite")

    def in_layer(self, config: ModelConfig, layer: int) -> NormMethod:
        post = math.floor(self.post_share * config.num_layers + 0.5)
        return PostLN() if layer < post else RMSNormMethod()

    def weight_std(self, config: ModelConfig, name: str, module: nn.Module) -> float | None:
        return self.embedding_std if name == "embed_tokens" else None
