"""A key-value cache of fixed size: allocated once, written in place at tensor positions, so decoding compiles once."""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from llmstack.model.config import ModelConfig


class LayerCache(Protocol):
    """Keys and values of one block, or of some rows of it."""

    def update(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write [batch, kv_heads, seq, head_dim] at ``positions`` [batch, seq].

        Returns:
            all keys and values, [batch, kv_heads, length, head_dim] each, in the dtype of what was written.
        """


class Cache(Protocol):
    """What attention needs of a cache."""

    def layer(self, index: int) -> LayerCache:
        """The part of block ``index``."""

    def mask(self, positions: Tensor) -> Tensor | None:
        """Which cached positions each query may see, [batch, 1, seq, length] for ``positions`` [batch, seq].

        None: those before it and itself.
        """


class Part(NamedTuple):
    """Some rows of a cache, up to a position."""

    rows: Tensor | None
    """[batch] indices; none: all."""
    length: int
    """Positions."""


class Stored(nn.Module):
    """Keys or values of one block, [batch, kv_heads, max_length, head_dim]; a write is the model's dtype, cast."""

    data: Tensor

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("data", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def write(self, new: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Put ``new`` [batch, kv_heads, seq, head_dim] at ``positions`` [batch, seq] of ``rows`` [batch, 1]."""
        self.data[rows, :, positions] = new.transpose(1, 2).to(self.data.dtype)

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        """[batch, kv_heads, length, head_dim]."""
        return _taken(self.data, part).to(dtype)


class StoredInt8(Stored):
    """Whole numbers of -127 to 127 and one fp32 scale for each vector of a position and head."""

    scale: Tensor

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.register_buffer("scale", torch.zeros(*shape[:-1], 1, device=device), persistent=False)

    def write(self, new: Tensor, rows: Tensor, positions: Tensor) -> None:
        wide = new.transpose(1, 2).float()
        scale = wide.abs().amax(-1, keepdim=True) / 127
        self.data[rows, :, positions] = (wide / scale.clamp(min=1e-30)).round().to(torch.int8)
        self.scale[rows, :, positions] = scale

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        return (_taken(self.data, part) * _taken(self.scale, part)).to(dtype)


def _taken(stored: Tensor, part: Part) -> Tensor:
    begun = stored[:, :, : part.length]
    return begun if part.rows is None else begun[part.rows]


class BlockCache(nn.Module):
    """Keys and values of one block."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        kind = StoredInt8 if dtype == torch.int8 else Stored
        self.keys, self.values = kind(shape, dtype, device), kind(shape, dtype, device)

    def update(
        self, keys: Tensor, values: Tensor, positions: Tensor, part: Part | None = None
    ) -> tuple[Tensor, Tensor]:
        """:class:`LayerCache`'s, for the given ``part``; none: the whole."""
        if part is None:
            part = Part(None, self.keys.data.shape[2])
        rows = torch.arange(keys.shape[0], device=keys.device) if part.rows is None else part.rows
        self.keys.write(keys, rows[:, None], positions)
        self.values.write(values, rows[:, None], positions)
        return self.keys.read(part, keys.dtype), self.values.read(part, values.dtype)


class KVCache(nn.Module):
    """The cache of all blocks. Only the key and value heads are stored, not their copies for each query.

    Args:
        config: of the model.
        batch_size: rows.
        max_length: positions of each.
        dtype: of the stored numbers; int8: with a scale for each vector.
        device: where they lie.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.batch_size, self.max_length = batch_size, max_length
        shape = (batch_size, config.kv_heads, max_length, config.head_size)
        self.layers = nn.ModuleList(BlockCache(shape, dtype, torch.device(device)) for _ in range(config.num_layers))

    def layer(self, index: int) -> BlockCache:
        """The cache of block ``index``."""
        return cast(BlockCache, self.layers[index])

    def mask(self, positions: Tensor) -> Tensor:
        """Which cached positions each query may see, [batch, 1, seq, max_length] for ``positions`` [batch, seq]."""
        return _seen(positions, self.max_length)

    def part(self, rows: Tensor | None, length: int) -> PartOfCache:
        """``rows`` [batch] (none: all) with their first ``length`` positions, to be written and read as a cache."""
        return PartOfCache(self, Part(rows, length))

    @torch.no_grad()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Give row ``target`` the first ``length`` positions of row ``source``."""
        for buffer in self.buffers():
            buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self) -> None:
        """Forget everything: a masked position has weight 0, yet 0·NaN is NaN."""
        for buffer in self.buffers():
            buffer.zero_()


class PartOfCache:
    """Some rows of a :class:`KVCache` up to a position."""

    def __init__(self, cache: KVCache, part: Part) -> None:
        self._cache, self._part = cache, part

    def layer(self, index: int) -> PartOfBlock:
        """The part of block ``index``."""
        return PartOfBlock(self._cache.layer(index), self._part)

    def mask(self, positions: Tensor) -> Tensor | None:
        """As :meth:`KVCache.mask`; none where the queries are all positions of the part: then it is causal."""
        return None if positions.shape[1] == self._part.length else _seen(positions, self._part.length)


class PartOfBlock(NamedTuple):
    """The same of one block."""

    cache: BlockCache
    part: Part

    def update(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """:class:`LayerCache`'s."""
        return self.cache.update(keys, values, positions, self.part)


def _seen(positions: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=positions.device) <= positions[:, None, :, None]


def cache_bytes(config: ModelConfig, batch_size: int, max_length: int, bytes_per_value: int) -> int:
    """Size of the cache: 2 · layers · kv heads · head dim · positions · batch · bytes; int8 (1) has a scale of 4 more.

    The scale belongs to each vector of head_dim numbers.
    """
    vectors = 2 * config.num_layers * config.kv_heads * max_length * batch_size
    return vectors * (config.head_size * bytes_per_value + (4 if bytes_per_value == 1 else 0))
