"""Rotary position embedding (Su et al., arXiv 2104.09864) in Hugging Face's half-split layout, always in fp32."""

import math

import torch
from torch import Tensor, nn

from llmstack.model.config import ModelConfig, RopeScaling
from llmstack.model.float32 import Float32Buffers

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine, each [batch or 1, seq, head_dim], fp32."""


class RotaryEmbedding(Float32Buffers, nn.Module):
    """Angles of each position. The frequencies stay fp32 when the model is cast."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(config.head_size // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """(Re)compute the frequencies: they are derived, so a model built on the meta device needs this too."""
        device = self.inv_freq.device
        if device.type != "meta":
            self.inv_freq = inverse_frequencies(self.config).to(device)

    def forward(self, positions: Tensor) -> Rotation:
        """``positions`` [batch or 1, seq], integers -> the rotation of each position."""
        half = positions[..., None].float() * self.inv_freq
        angles = torch.cat((half, half), dim=-1)
        return angles.cos(), angles.sin()


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """theta^(-2i/d) for each pair i, [head_dim / 2] fp32, with Llama-3 scaling where configured."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _llama3_scaled(frequencies, config.rope_scaling)


def _llama3_scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend linearly between (Llama 3.1 reference code)."""
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate ``x`` [batch, heads, seq, head_dim]; computed in fp32, returned in x's dtype."""
    cos, sin = (table.unsqueeze(1) for table in rotation)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
