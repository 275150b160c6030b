"""The LM head with its loss: a linear layer and cross-entropy in chunks, so that the full logits never exist.

With a vocabulary of 128,256 the logits of 2 x 1024 tokens are 1 GB in fp32; here one chunk of them exists at a time.
Its loss and its gradient are found together, in the forward pass, so the big product is not computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Label of a position that is not predicted."""

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Size of one chunk of fp32 logits: on a CPU small against the model; on a GPU large enough for full matrix speed."""

SLAB_ROWS = 16384
"""Rows of the weight gradient that one low-precision product covers before it is added in fp32."""

LossKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class LMHead(nn.Module):
    """Linear map from hidden states to logits, or straight to their loss."""

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.loss_kernel: LossKernel = loss_and_gradient_

    def forward(self, hidden: Tensor, labels: Tensor | None = None, valid_tokens: Tensor | int | None = None) -> Tensor:
        """``hidden`` [batch, seq, hidden] -> logits, token losses or the loss.

        Args:
            hidden: output of the final norm.
            labels: [batch, seq] ids that each position must predict (already shifted), -100 to leave one out.
            valid_tokens: number of valid labels of the whole optimiser step, an integer.

        Returns:
            Without labels: logits [batch, seq, vocab]. With labels alone: -log p of each, [batch, seq] fp32, 0 where
            left out, not differentiable. With both: their sum over this batch / ``valid_tokens``, fp32 scalar.
        """
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        flat, targets = hidden.flatten(0, -2), labels.flatten()
        if valid_tokens is None:
            with torch.no_grad():
                losses = chunked_loss(flat, self.weight, self.bias, targets, self.loss_kernel)
            return losses.view(labels.shape)
        scale = torch.as_tensor(valid_tokens, device=hidden.device).to(_wide(hidden.dtype)).reciprocal()
        if not torch.is_grad_enabled():
            return chunked_loss(flat, self.weight, self.bias, targets, self.loss_kernel).sum() * scale
        return _LinearCrossEntropy.apply(flat, self.weight, self.bias, targets, scale, self.loss_kernel)


def loss_and_gradient_(logits: Tensor, labels: Tensor, scale: Tensor | None) -> Tensor:
    """Cross-entropy of a chunk of ``logits`` [tokens, vocab] in fp32 -> [tokens], 0 where the label is -100.

    With a ``scale`` the logits are overwritten by their gradient: (softmax − one-hot)·scale. Made to be compiled: the
    passes over the vocabulary then run without temporaries.
    """
    wide = logits.to(_wide(logits.dtype))
    normaliser = torch.logsumexp(wide, dim=-1)
    valid = labels != IGNORE_INDEX
    targets = torch.where(valid, labels, 0)
    losses = torch.where(valid, normaliser - wide.gather(1, targets[:, None]).squeeze(1), 0.0)
    if scale is not None:
        factor = torch.where(valid, scale, 0.0)[:, None]
        hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        logits.copy_((torch.exp(wide - normaliser[:, None]) - hit.to(wide.dtype)) * factor)
    return losses


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    kernel: LossKernel = loss_and_gradient_,
) -> Tensor:
    """Cross-entropy of each row of ``hidden`` [tokens, hidden] -> [tokens] fp32; no gradient."""
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    parts = [kernel(_logits(part, weight, bias), target, None) for part, target, _ in _chunks(hidden, weight, labels)]
    return torch.cat(parts)[: labels.shape[0]]


class _LinearCrossEntropy(torch.autograd.Function):
    """Σ cross-entropy(hidden·Wᵀ + b, labels)·scale with its gradients, a chunk of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        kernel: LossKernel,
    ) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden, low_weight, low_bias = _in_compute_dtype(hidden, weight, bias)
        wide = _wide(hidden.dtype)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=hidden.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=hidden.device)
        for part, target, rows in _chunks(hidden, low_weight, labels):
            logits = _logits(part, low_weight, low_bias)
            loss += kernel(logits, target, scale).sum()
            grad_hidden[rows] = (logits @ low_weight)[: grad_hidden[rows].shape[0]]
            _accumulate(grad_weight, logits, part)
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
            del logits  # before the next chunk is made, or two exist at a time
        ctx.gradients = [grad_hidden, grad_weight, grad_bias]
        return loss * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the loss of the LM head supports one backward pass: its gradients are scaled in place")
        (grad_hidden, grad_weight, grad_bias), ctx.gradients = ctx.gradients, None
        grads = [None if grad is None else grad.mul_(grad_output) for grad in (grad_hidden, grad_weight, grad_bias)]
        hidden_dtype, weight_dtype = ctx.dtypes
        dtypes = (hidden_dtype, weight_dtype, weight_dtype)
        cast = [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        return *cast, None, None, None


def _accumulate(grad_weight: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """grad_weight += grad_logitsᵀ·hidden with the sum over chunks in fp32 (or wider)."""
    if grad_logits.dtype == grad_weight.dtype:
        grad_weight.addmm_(grad_logits.T, hidden)
        return
    for start in range(0, grad_weight.shape[0], SLAB_ROWS):
        slab = slice(start, start + SLAB_ROWS)
        grad_weight[slab] += grad_logits[:, slab].T @ hidden


def chunk_rows(tokens: int, vocab_size: int, device_type: str) -> int:
    """Rows of the logits that exist at one time, of ``tokens`` in all, on a device of that type (`cpu`, `cuda`)."""
    limit = max(_CHUNK_BYTES.get(device_type, 2**29) // (4 * vocab_size), 1)
    count = max(-(-tokens // limit), 1)
    return -(-tokens // count)


def _chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor, slice]]:
    """Equal chunks of tokens (the last padded, so that a compiled kernel sees one shape) and the rows each covers."""
    tokens = hidden.shape[0]
    size = chunk_rows(tokens, weight.shape[0], hidden.device.type)
    chunks = []
    for start in range(0, tokens, size):
        rows = slice(start, min(start + size, tokens))
        missing = size - (rows.stop - rows.start)
        part, target = hidden[rows], labels[rows]
        if missing:
            part, target = F.pad(part, (0, 0, 0, missing)), F.pad(target, (0, missing), value=IGNORE_INDEX)
        chunks.append((part, target, rows))
    return chunks


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden, weight, bias)


def _in_compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three in autocast's type where it is on, else in that of ``hidden``."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to accumulate in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
