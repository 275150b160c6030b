"""A key-value cache of fixed size: allocated once, written in place at tensor positions, so decoding compiles once."""

from typing import cast

import torch
from torch import Tensor, nn

from llmstack.model.config import ModelConfig


class LayerCache(nn.Module):
    """Keys and values of one block, each [batch, kv_heads, max_length, head_dim]."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("values", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def update(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write [batch, kv_heads, seq, head_dim] at ``positions`` [batch, seq]; returns all keys and values."""
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        self.keys[rows, :, positions] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, :, positions] = values.transpose(1, 2).to(self.values.dtype)
        return self.keys, self.values


class KVCache(nn.Module):
    """One :class:`LayerCache` per block. Only the key and value heads are stored, not their copies for each query."""

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
        self.layers = nn.ModuleList(LayerCache(shape, dtype, torch.device(device)) for _ in range(config.num_layers))

    def layer(self, index: int) -> LayerCache:
        """The cache of block ``index``."""
        return cast(LayerCache, self.layers[index])

    def mask(self, positions: Tensor) -> Tensor:
        """Which cached positions each query may see, [batch, 1, seq, max_length] for ``positions`` [batch, seq]."""
        stored = torch.arange(self.max_length, device=positions.device)
        return stored <= positions[:, None, :, None]


def cache_bytes(config: ModelConfig, batch_size: int, max_length: int, bytes_per_value: int) -> int:
    """Size of the cache: 2 · layers · kv heads · head dim · positions · batch · bytes."""
    return 2 * config.num_layers * config.kv_heads * config.head_size * max_length * batch_size * bytes_per_value
