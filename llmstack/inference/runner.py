"""What a generator needs of a model: prompts go in by pieces, then every row by one token, or a few, at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from llmstack.model import KVCache, Llama


class Runner(Protocol):
    """A model with the memory of what its rows have read."""

    batch_size: int
    max_length: int
    device: torch.device

    def extend(self, ids: Tensor, start: int, rows: Tensor) -> Tensor:
        """Let ``rows`` [n] read ``ids`` [n, seq] at the positions from ``start`` on.

        Returns:
            what the head reads, [n, seq, hidden].
        """

    def head(self, hidden: Tensor) -> Tensor:
        """``hidden`` [..., hidden] -> logits [..., vocab]."""

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Let every row read ``ids`` [batch, width] at ``positions`` [batch, width] -> logits [batch, width, vocab]."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Let row ``target`` have read what row ``source`` has, up to ``length`` tokens."""

    def clear(self) -> None:
        """Forget everything."""


class CachedRunner:
    """Keys and values are kept.

    Args:
        model: in evaluation mode.
        batch_size: rows.
        max_length: positions of each row.
        cache_dtype: of stored keys and values.
        compile: one graph for each width that is decoded, of the whole model (a graph break is an error). The positions
            are tensors and no shape changes, so that no prompt and no length makes another one.
    """

    def __init__(self, model: Llama, batch_size: int, max_length: int, cache_dtype: torch.dtype, compile: bool) -> None:
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self.device = model.embed_tokens.weight.device
        self.cache = KVCache(model.config, batch_size, max_length, cache_dtype, self.device)
        self._compiled: dict[int, Callable[..., Tensor]] | None = {} if compile else None

    @torch.no_grad()
    def extend(self, ids: Tensor, start: int, rows: Tensor) -> Tensor:
        """See :class:`Runner`. Eager: a prompt's length is its own, and its products are large."""
        length = start + ids.shape[1]
        positions = torch.arange(start, length, device=self.device)[None]
        part = self.cache.part(None if len(rows) == self.batch_size else rows, length)
        return self.model.hidden_states(ids, positions=positions, cache=part)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """See :class:`Runner`."""
        return self.model.lm_head(hidden)

    @torch.no_grad()
    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See :class:`Runner`."""
        if self._compiled is None:
            return _decode(self.model, self.cache, ids, positions)
        width = ids.shape[1]
        if width not in self._compiled:
            self._compiled[width] = _own_graph(_decode, self.device)
        return self._compiled[width](self.model, self.cache, ids, positions)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See :class:`Runner`."""
        self.cache.copy_row(source, target, length)

    def clear(self) -> None:
        """See :class:`Runner`."""
        self.cache.clear()


class UncachedRunner:
    """Every token costs a full pass over all before it. It proves the cache right."""

    def __init__(self, model: Llama, batch_size: int, max_length: int) -> None:
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self.device = model.embed_tokens.weight.device
        self._ids = torch.zeros(batch_size, max_length, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def extend(self, ids: Tensor, start: int, rows: Tensor) -> Tensor:
        """See :class:`Runner`."""
        length = start + ids.shape[1]
        self._ids[rows, start:length] = ids
        return self.model.hidden_states(self._ids[rows, :length])[:, start:]

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """See :class:`Runner`."""
        return self.model.lm_head(hidden)

    @torch.no_grad()
    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See :class:`Runner`."""
        rows = torch.arange(self.batch_size, device=self.device)[:, None]
        self._ids[rows, positions] = ids
        hidden = self.model.hidden_states(self._ids[:, : int(positions.max()) + 1])
        return self.model.lm_head(hidden[rows, positions])

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See :class:`Runner`."""
        self._ids[target, :length] = self._ids[source, :length]

    def clear(self) -> None:
        """See :class:`Runner`."""
        self._ids.zero_()


def _decode(model: Llama, cache: KVCache, ids: Tensor, positions: Tensor) -> Tensor:
    return model.lm_head(model.hidden_states(ids, positions=positions, cache=cache))


def _own_graph(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """``function`` compiled for the one set of shapes that its runner calls it with.

    The compiler keeps its graphs, and counts them against a limit of 8, by code object: each runner has one of its own.
    Nor does it have to ask at each call whether the graph still fits (guards): model, cache and shapes stay the same.
    """
    plain = cast(FunctionType, function)
    own = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if device.type == "cuda":
        options["triton.cudagraphs"] = True
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)
