"""Several sets in fixed shares, in an order that is as pure as that of one set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import ConcatDataset

from llmstack.data.batches import SampleSource
from llmstack.data.order import SampleOrder, random64
from llmstack.errors import UserError

ROUND = 1000
"""Samples in which every set gives its share exactly."""


class LaidEndToEnd(ConcatDataset[dict[str, object]]):
    """Several sets as one, the second after the first."""

    def valid_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels other than -100 of each of these samples."""
        ends = np.asarray(self.cumulative_sizes)
        which = np.searchsorted(ends, indices, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        found = np.zeros(indices.shape, dtype=np.int64)
        for number, part in enumerate(self.datasets):
            mine = which == number
            source: SampleSource = part  # type: ignore[assignment]
            found[mine] = source.valid_tokens(indices[mine] - starts[number])
        return found


class MixtureOrder:
    """Sample ``i`` of the run (0, 1, 2, ... without end) -> index into the sets laid end to end.

    Of each :data:`ROUND` samples every set gives its share, at places of a pseudo-random order; what a set gives is its
    own :class:`SampleOrder`, one epoch after the other, each in a new order.

    Args:
        sizes: samples of each set.
        weights: its share, up to a common factor.
        seed: of all orders.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.num_samples = sum(sizes)
        self.shares = whole_shares(weights)
        """Samples that each set gives of :data:`ROUND`."""
        seeds = random64(seed, np.arange(len(sizes) + 1))
        self._places = SampleOrder(ROUND, int(seeds[0]))
        self._orders = [SampleOrder(size, int(own)) for size, own in zip(sizes, seeds[1:], strict=True)]
        self._starts = [0, *accumulate(sizes)]

    def __call__(self, samples: ArrayLike) -> NDArray[np.int64]:
        """Indices (int64, of the same shape) of the samples with these numbers."""
        samples = np.asarray(samples, dtype=np.int64)
        rounds, places = np.divmod(samples.reshape(-1), ROUND)
        found = np.empty_like(places)
        for number in np.unique(rounds):
            mine = rounds == number
            found[mine] = self._round(int(number))[places[mine]]
        return found.reshape(samples.shape)

    def count(self, num_samples: int) -> list[int]:
        """How many of the run's first ``num_samples`` each set has given."""
        rounds, rest = divmod(num_samples, ROUND)
        extra = np.bincount(self._givers(rounds)[:rest], minlength=len(self.shares))
        return [rounds * share + int(more) for share, more in zip(self.shares, extra, strict=True)]

    def _givers(self, number: int) -> NDArray[np.int64]:
        """The set that gives each sample of a round."""
        places = self._places(np.arange(number * ROUND, (number + 1) * ROUND))
        return np.searchsorted(np.cumsum(self.shares), places, side="right")

    def _round(self, number: int) -> NDArray[np.int64]:
        """The indices of a round."""
        givers, indices = self._givers(number), np.empty(ROUND, dtype=np.int64)
        for which, (order, share, start) in enumerate(zip(self._orders, self.shares, self._starts, strict=False)):
            indices[givers == which] = start + order(np.arange(number * share, (number + 1) * share))
        return indices


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Of :data:`ROUND` samples, in proportion to ``weights`` (largest remainders), at least one each.

    Raises:
        UserError: a weight that is not a positive number.
    """
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise UserError(f"data.mixture: a weight is {weight:g}; weights must be positive numbers")
    wanted = [ROUND * weight / sum(weights) for weight in weights]
    shares = [max(int(share), 1) for share in wanted]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - wanted[i])
    for i in by_remainder[: max(ROUND - sum(shares), 0)]:
        shares[i] += 1
    while sum(shares) > ROUND:
        shares[shares.index(max(shares))] -= 1
    return shares
