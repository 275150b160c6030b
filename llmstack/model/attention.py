"""Causal self-attention with grouped key-value heads, and the masks it takes."""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from llmstack.model.config import ModelConfig
from llmstack.model.kv_cache import LayerCache
from llmstack.model.rope import Rotation, rotate


class TrunkMask(NamedTuple):
    """The first tokens look at all before them, which needs no mask; the others at what one says."""

    trunk: int
    """How many those are, 1 at least."""
    rest: Tensor
    """[batch, 1, seq - trunk, seq]."""


Mask = Tensor | BlockMask | TrunkMask
"""Who may look at whom: [batch, 1, seq, keys], true where a query may look; the same by tiles of 128 x 128; or that."""

Attend = Callable[..., Tensor]


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, by the number of key-value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_size
        self.scale = 1 / math.sqrt(self.head_dim) if config.score_scaling else 1.0
        query_width, kv_width = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        rotation: Rotation | None,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """``x`` [batch, seq, hidden], or a pair of them for queries and keys, and for values -> the same shape.

        Without a ``mask``: causal. With a ``cache``, keys and values are written at ``positions`` [batch, seq] and the
        mask covers the cache's whole length.
        """
        for_scores, for_values = x if isinstance(x, tuple) else (x, x)
        batch, length, _ = for_scores.shape
        q = self.q_proj(for_scores).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(for_scores).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(for_values).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            assert positions is not None, "a cache needs the positions to write at"
            k, v = cache.update(k, v, positions)
        out = self._attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """Attention of q [batch, heads, seq, dim] over k, v [batch, kv_heads, keys, dim]."""
        groups = self.num_heads // self.kv_heads
        if isinstance(mask, BlockMask):
            attend = cast(Attend, flex_attention) if torch.compiler.is_compiling() else _compiled_flex_attention()
            return attend(q, k, v, block_mask=mask, scale=self.scale, enable_gqa=groups > 1)
        if isinstance(mask, TrunkMask):
            cut = mask.trunk
            trunk = self._attend(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], None)
            return torch.cat((trunk, self._attend(q[:, :, cut:], k, v, mask.rest)), dim=2)
        if groups > 1 and q.shape[2] == 1 and mask is not None:
            # One query per row: the query heads that share a key-value head become its queries, nothing is copied.
            grouped = q.view(q.shape[0], self.kv_heads, groups, self.head_dim)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self.scale)
            return out.reshape(q.shape)
        if groups > 1:
            # Copies made here, not by enable_gqa: its fp32 form falls to the slow path that builds the score matrix.
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)


@cache
def _compiled_flex_attention() -> Attend:
    """Uncompiled it would hold the matrix of all scores."""
    return torch.compile(flex_attention, dynamic=False)


def attention_mask(padding_mask: Tensor | None, document_ids: Tensor | None) -> Mask | None:
    """Causal mask that also hides padding and other documents; none if neither is given.

    ``padding_mask`` [batch, seq] is true (or 1) at real tokens; ``document_ids`` [batch, seq] are integers. A query
    always sees itself, so that no row of the mask is empty (an empty softmax is NaN). On a GPU documents alone are
    masked by tiles: what lies between documents is never computed.
    """
    if document_ids is not None and padding_mask is None and document_ids.is_cuda:
        return document_tiles(document_ids)
    return dense_mask(padding_mask, document_ids)


def document_tiles(document_ids: Tensor) -> BlockMask:
    """Causal within each document of ``document_ids`` [batch, seq], for FlexAttention (arXiv 2412.05496)."""
    batch, length = document_ids.shape

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    return create_block_mask(visible, batch, None, length, length, device=document_ids.device)


def dense_mask(padding_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """:func:`attention_mask`, pair by pair: [batch, 1, seq, seq]."""
    given = padding_mask if padding_mask is not None else document_ids
    if given is None:
        return None
    length = given.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=given.device).tril()
    visible = causal.expand(given.shape[0], 1, length, length)
    if padding_mask is not None:
        visible = visible & padding_mask.bool()[:, None, None, :]
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return visible | torch.eye(length, dtype=torch.bool, device=given.device)


def document_positions(document_ids: Tensor) -> Tensor:
    """Positions that restart at each document, [batch, seq] from ids [batch, seq] whose equal runs are documents."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values
