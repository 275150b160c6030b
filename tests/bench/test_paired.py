"""Intervals of medians from the sign test, and ratios that common noise leaves alone."""

import random
from statistics import median

import pytest

from llmstack.bench.paired import median_interval, paired_ratio


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (15, 4, 12), (20, 6, 15), (50, 18, 33)],
)
def test_the_ranks_are_those_of_the_tables(count: int, low: int, high: int) -> None:
    """95 % ranks of the sign test (Conover, Practical Nonparametric Statistics, from the binomial table)."""
    values = random.Random(0).sample(range(1, count + 1), count)
    assert median_interval(values) == ((count + 1) / 2, low, high)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of a skewed distribution with median 1. Exactly 1 - 2·(1 + 15 + 105 + 455)/2^15 for 15 values."""
    draw, trials, covered = random.Random(1), 4000, 0
    for _ in range(trials):
        _, low, high = median_interval([draw.lognormvariate(0, 2) for _ in range(15)])
        covered += low <= 1 <= high
    assert covered / trials == pytest.approx(1 - 2 * 576 / 2**15, abs=0.012)


def test_a_ratio_is_immune_to_what_disturbs_both() -> None:
    """A machine that slows down tenfold, with bursts that hit both timings of a pair: the ratio stays 1.25."""
    draw = random.Random(2)
    speed = [10 ** (n / 40) * draw.choice((1, 1, 1, 30)) for n in range(40)]
    reference = [s * draw.uniform(0.99, 1.01) for s in speed]
    times = [1.25 * s * draw.uniform(0.99, 1.01) for s in speed]
    found = paired_ratio(times, reference)
    assert found.low <= 1.25 <= found.high
    assert found.high - found.low < 0.03
    # Without pairs the same timings say nothing.
    low, high = (bound / median(reference) for bound in median_interval(times)[1:])
    assert high - low > 0.5


def test_a_ratio_of_a_thing_to_itself_is_one() -> None:
    times = [random.Random(3).lognormvariate(0, 1) for _ in range(10)]
    assert paired_ratio(times, times) == (1, 1, 1)
