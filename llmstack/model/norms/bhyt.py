"""BHyT: bounded tanh whose second site approximates its variance from the first (arXiv 2601.09719, released code).

    site 1:  v1 = ms(x)                      u = γ1 ⊙ tanh( (λ1/κ)·x  / sqrt(v1 + 1e-6) )
    site 2:  v2 = v1 + c_attn·λ1²/κ²         w = γ2 ⊙ tanh( (λ2/κ)·x' / sqrt(v2 + 1e-6) )
    c_attn = ||W_V W_O||_F² / (T·d)          one scalar per block, T the training length, no reduction over x'

c_attn is the mean element variance of uniform attention over T independent tokens of unit variance. λ1 and c_attn are
constants in the correction: no gradient goes through them. c_attn is stale between its refreshes, by design. Blocks
named in ``exact_layers`` measure at both sites: they are BHyT*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.norms.bhyt_star import BareBoundedTanh, BHyTStar, BoundedTanh, Statistics
from llmstack.model.norms.folded import Folded
from llmstack.model.norms.layer_ranges import parse_layers, select_layers
from llmstack.model.norms.method import NOTHING, Gather, whole

if TYPE_CHECKING:
    from llmstack.model.attention import Attention
    from llmstack.model.config import ModelConfig
    from llmstack.model.llama import Llama

PUBLISHED_TRAIN_LENGTH = 1024


class FirstBHyT(BoundedTanh):
    """The first site: exact statistics, handed on with the attention's expected contribution added.

    ``c_attn`` (fp32) and the training length it belongs to are saved with the weights.
    """

    c_attn: Tensor
    train_length: Tensor

    def __init__(self, hidden_size: int, lam: float, kappa: float, trainable: bool, mu_term: bool) -> None:
        super().__init__(hidden_size, lam, kappa, trainable, mu_term)
        self.register_buffer("c_attn", torch.zeros(1))
        self.register_buffer("train_length", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Statistics]:  # type: ignore[override]
        """``x`` [batch, seq, hidden] -> (bounded, statistics for the second site)."""
        spread, mean = self.statistics(x)
        correction = self.c_attn * (self.lam.detach().to(spread.dtype) / self.kappa) ** 2
        return self.squash(x, (spread, mean)), (spread + correction, mean)

    def folded(self) -> Folded:
        return self.folded_into(FirstBareBHyT)


class SecondBHyT(BoundedTanh):
    """The second site: the statistics of the first, corrected; nothing is measured.

    With the |μ| term the mean of the first site serves too: attention output has mean zero under the same assumption.
    """

    def forward(self, x: Tensor, carry: Statistics) -> Tensor:  # type: ignore[override]
        """``x`` [batch, seq, hidden] and the first site's statistics -> the same shape and dtype."""
        return self.squash(x, carry)

    def folded(self) -> Folded:
        return self.folded_into(SecondBareBHyT)


class FirstBareBHyT(BareBoundedTanh, FirstBHyT):
    """The first site without its γ."""

    correction: Tensor
    """c_attn·λ²/κ²."""

    def settle(self) -> None:
        super().settle()
        self.register_buffer("correction", self.c_attn * self.ratio**2, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Statistics]:  # type: ignore[override]
        spread, mean = self.statistics(x)
        return self.bounded(x, (spread, mean)), (spread + self.correction, mean)


class SecondBareBHyT(BareBoundedTanh, SecondBHyT):
    """The second site without its γ."""


@dataclass(frozen=True)
class BHyT(BHyTStar):
    """BHyT with the variance approximation; options of BHyT* and the training length of c_attn."""

    name: ClassVar[str] = "bhyt"
    uses_train_length: ClassVar[bool] = True

    train_length: int | None = None
    """T of c_attn in tokens; null: the block length of the training data (outside training: 1024, as published)."""
    exact_layers: str | int | None = None
    """Layers (from 0) whose second site measures for itself: `0-3`, `12-` (to the top), `0-3,12-`; null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_length is not None and self.train_length < 1:
            raise UserError(f"norm bhyt: train_length is {self.train_length}; it must be at least 1")
        if self.exact_layers is not None:
            parse_layers(self.exact_layers, "norm bhyt: exact_layers")

    def measures(self, config: ModelConfig, layer: int) -> bool:
        """Whether the second site of block ``layer`` (from 0) has statistics of its own."""
        if self.exact_layers is None:
            return False
        return layer in select_layers(self.exact_layers, config.num_layers, "norm bhyt: exact_layers")

    def check(self, config: ModelConfig) -> None:
        self.measures(config, 0)

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        if self.measures(config, layer):
            return super().attention_norm(config, layer)
        return FirstBHyT(
            config.hidden_size, self.lambda_attention, self.kappa_in(layer), self.trainable_lambda, self.mu_term
        )

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        if self.measures(config, layer):
            return super().mlp_norm(config, layer)
        return SecondBHyT(
            config.hidden_size, self.lambda_mlp, self.kappa_in(layer), self.trainable_lambda, self.mu_term
        )

    def initialise(self, model: Llama, gather: Gather = whole) -> None:
        """c_attn of the initialised weights (the released code took it before the initialisation)."""
        self.refresh(model, gather)

    def after_step(
        self, model: Llama, step: int, max_steps: int, gather: Gather = whole, sums: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Refresh c_attn every clamp(max_steps // 50, 1, 1000) steps."""
        if step % refresh_interval(max_steps) == 0:
            self.refresh(model, gather)

    @torch.no_grad()
    def refresh(self, model: Llama, gather: Gather = whole) -> None:
        """Recompute c_attn of every block that has one from its present weights."""
        length = self.train_length or PUBLISHED_TRAIN_LENGTH
        for block in self.blocks(model):
            site, attention = block.attention_norm, block.attention
            if not isinstance(site, FirstBHyT):
                continue
            with gather([attention.v_proj.weight, attention.o_proj.weight]):
                gain = value_output_gain(attention)
                site.c_attn.copy_(gain / (length * attention.o_proj.weight.shape[0]))
            site.train_length.fill_(length)


def refresh_interval(max_steps: int) -> int:
    """Steps between two refreshes of c_attn: about 50 in a run, at most 1000 apart."""
    return min(max(max_steps // 50, 1), 1000)


def value_output_gain(attention: Attention) -> Tensor:
    """||W_V W_O||_F² of grouped-query attention, fp32 scalar, without building the [hidden, hidden] product.

    Query heads that share a value head add up: with S the sum of W_O's column blocks over each group
    [hidden, kv_heads·head_dim], the product is S·W_V and its squared norm sum((W_V W_Vᵀ) ⊙ (Sᵀ S)).
    """
    value, output = attention.v_proj.weight.float(), attention.o_proj.weight.float()
    groups = attention.num_heads // attention.kv_heads
    summed = output.view(-1, attention.kv_heads, groups, attention.head_dim).sum(2).flatten(1)
    return ((value @ value.T) * (summed.T @ summed)).sum()
