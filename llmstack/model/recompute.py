"""Activation checkpointing (Chen et al., arXiv 1604.06174): what the backward pass computes again, not keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["nothing", "all", "cheap"]
"""Of a block: keep every activation; keep its input alone; or keep what matrix products and attention gave, too."""

_KEPT = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    )
)
"""Operations that cost more to repeat than their output costs to keep."""


def recomputed(what: Recompute, forward: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """``forward(*arguments)``, whose backward pass computes ``what`` again. Works inside ``torch.compile``."""
    if what == "all":
        return checkpoint(forward, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_of_layer(setting: str | int, layer: int) -> Recompute:
    """What block ``layer`` (from 0) computes again.

    Args:
        setting: `none`, `full`, `selective`, or a number k: full for every k-th block.
    """
    if isinstance(setting, int):
        return "all" if layer % setting == 0 else "nothing"
    choices: dict[str, Recompute] = {"none": "nothing", "full": "all", "selective": "cheap"}
    return choices[setting]
