"""Medians, and ratios of timings taken in pairs, with intervals that assume nothing of how the noise is distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

LEVEL = 0.95
"""Least probability that an interval covers the median of what was sampled."""
FEWEST = 6
"""Values that an interval of this level needs: all of n lie on one side of the median with probability 2^(1-n)."""


class Estimate(NamedTuple):
    """A median and its interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Estimate:
    """The median of independent ``values`` with its interval of :data:`LEVEL`, by the sign test.

    Each value is below the true median with probability 1/2, whatever the distribution. So the k-th smallest and the
    k-th largest of n enclose it with probability 1 - 2·P(Binomial(n, 1/2) < k); k is the largest that keeps the level.
    """
    assert len(values) >= FEWEST, f"{len(values)} values; an interval needs {FEWEST}"
    ordered, outside = sorted(values), 0.0
    for rank in range(len(ordered)):
        outside += 2 * math.comb(len(ordered), rank) / 2 ** len(ordered)
        if outside > 1 - LEVEL:
            break
    return Estimate(median(ordered), ordered[rank - 1], ordered[-rank])


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Estimate:
    """How many times as long as the ``reference``, by the ratios of timings made next to each other.

    What slows both down (another process, a clock that sinks) cancels in each ratio.
    """
    return median_interval([one / other for one, other in zip(times, reference, strict=True)])
