"""From logits to the next id: greedy, or drawn after temperature, top-k and top-p, each row with its own generator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmstack.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How one sequence chooses its next id. Applied in the order temperature, top-k, top-p, as in transformers."""

    temperature: float = 0.0
    """Logits are divided by this; 0: greedy, the largest logit (of equal ones the lowest id)."""
    top_k: int | None = None
    """Keep the k largest logits, and all that equal the k-th; null: all."""
    top_p: float | None = None
    """Keep the smallest set of the most probable ids that holds at least this probability; null or 1: all."""
    seed: int = 0
    """Fixes the whole sequence of draws."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"sampling: temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"sampling: top_k is {self.top_k}; it must be at least 1 (leave it out to keep all ids)")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"sampling: seed is {self.seed}; it must be from 0 to 2^63 - 1")


class Sampler:
    """Draws one id for each row of a batch, step after step.

    A row uses one number of its own generator for each draw, so its ids depend on its logits and its ``Sampling``
    alone: not on the other rows, and not on the device, since the generators live on the CPU. Rows of one seed share
    their draws; give each its own seed for different continuations of one prompt.
    """

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self.rows = tuple(rows)
        self._generators = [torch.Generator().manual_seed(row.seed) for row in self.rows]

    def sample(self, logits: Tensor) -> Tensor:
        """``logits`` [batch, vocab] -> ids [batch].

        Raises:
            UserError: a row without a finite largest logit, which has no distribution.
        """
        assert logits.shape[0] == len(self.rows), "one Sampling for each row"
        if not torch.isfinite(logits.amax(-1)).all():
            raise UserError("the model's logits are NaN or infinite: its weights are damaged or overflow their dtype")
        drawn = [
            row_logits.argmax() if row.temperature == 0 else _draw(filtered_logits(row_logits, row), generator)
            for row_logits, row, generator in zip(logits, self.rows, self._generators, strict=True)
        ]
        return torch.stack(drawn)


def filtered_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """``logits`` [..., vocab] -> logits at the temperature, -inf where top-k or top-p leaves an id out; fp64.

    Of equal logits at the edge of top-p the higher ids stay, as in transformers.
    """
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        smallest = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ascending, order = scaled.sort(stable=True)
        below = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        below[..., -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(below).scatter(-1, order, below), -torch.inf)
    return scaled


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One id of ``logits`` [vocab] by inverting the cumulative distribution; fp64, so that small tails are not lost."""
    cumulative = logits.softmax(-1).cumsum(-1)
    uniform = torch.rand((), dtype=torch.float64, generator=generator).to(logits.device)
    # Right of equal values: an id of probability 0 repeats the sum before it and is never hit.
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
