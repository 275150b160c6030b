"""Buffers that keep fp32 precision when the model is cast to a smaller type."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Float32Buffers(nn.Module):
    """Floating-point buffers of this module (not of its children) follow device moves but never lose precision.

    Statistics and tables (``c_attn``, rotary frequencies) are fp32 whatever the dtype of the weights.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            moved = self._buffers[name]
            if moved is not None and before.dtype == torch.float32 and moved.dtype != torch.float32:
                self._buffers[name] = before.to(moved.device)
        return self
