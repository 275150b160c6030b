"""The order is a shuffle: a bijection in every epoch, uniform, without memory of the order before."""

import time

import numpy as np
import pytest

from llmstack.data import SampleOrder
from llmstack.data.order import random64

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 17, 31, 97, 100, 255, 256, 257, 1000, 4096, 7919, 65_536, 1_000_003]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epoch", [0, 1, 12_345])
def test_each_epoch_visits_each_index_once(size: int, epoch: int) -> None:
    order = SampleOrder(size, seed=11)
    indices = order(np.arange(epoch * size, (epoch + 1) * size))
    assert np.array_equal(np.sort(indices), np.arange(size))


def test_all_small_sizes_are_bijections() -> None:
    for size in range(1, 300):
        assert np.array_equal(np.sort(SampleOrder(size, seed=size)(np.arange(size))), np.arange(size))


def test_a_sample_depends_on_nothing_but_seed_and_number() -> None:
    order = SampleOrder(1000, seed=3)
    samples = np.arange(3000)
    together = order(samples)
    assert [int(order(int(i))) for i in samples[900:1100]] == together[900:1100].tolist()
    backwards = SampleOrder(1000, seed=3)(samples[::-1].reshape(3, 1000))
    assert np.array_equal(backwards.reshape(-1)[::-1], together)
    far = 10**15  # seeking far costs nothing and still permutes
    assert np.array_equal(np.sort(order(np.arange(far * 1000, far * 1000 + 1000))), np.arange(1000))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        SampleOrder(1000, seed)(np.arange(e * 1000, (e + 1) * 1000)) for seed in (0, 1, -1, 2**63) for e in (0, 1)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # The number of fixed points between two random orders is about Poisson(1).
            assert (one == other).sum() < 10


def check_uniform(indices: np.ndarray, size: int) -> None:
    counts = np.bincount(indices, minlength=size)
    expected = len(indices) / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < (size - 1) + 4.5 * np.sqrt(2 * (size - 1)) + 6  # beyond the 0.9999 quantile


@pytest.mark.parametrize("size", [2, 3, 5, 10])
@pytest.mark.parametrize("place", [0, -1])
def test_each_position_is_uniform_over_seeds(size: int, place: int) -> None:
    indices = [int(SampleOrder(size, seed)(place % size)) for seed in range(100 * size)]
    check_uniform(np.array(indices), size)


@pytest.mark.parametrize("size", [2, 3, 5, 10, 24, 100, 1000])
@pytest.mark.parametrize("place", [0, -1])
def test_each_position_is_uniform_over_epochs(size: int, place: int) -> None:
    check_uniform(SampleOrder(size, seed=7)(np.arange(200 * size) * size + place % size), size)


def test_all_orders_of_few_samples_come_up_equally() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(SampleOrder(4, seed)(np.arange(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 60  # chi-square with 23 degrees: p < 1e-4


@pytest.mark.parametrize("size", [1000, 10_007, 65_536])
def test_neighbours_are_independent(size: int) -> None:
    """Correlation of x[i] with x[i + lag] and with i itself; its standard deviation is 1 / sqrt(size)."""
    for seed in range(5):
        x = SampleOrder(size, seed)(np.arange(size)).astype(float)
        for lag in (1, 2, 3, 64):
            assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 5 / np.sqrt(size)
        assert abs(np.corrcoef(x, np.arange(size))[0, 1]) < 5 / np.sqrt(size)
        # Steps from one sample to the next are as those between random pairs: few to a neighbour.
        assert (np.abs(np.diff(x)) == 1).sum() < 2 + 5 * np.sqrt(2)


def test_epochs_are_independent() -> None:
    size = 10_007
    epochs = SampleOrder(size, 5)(np.arange(4 * size)).reshape(4, size).astype(float)
    correlation = np.corrcoef(epochs) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(size)


def test_a_million_indices_take_little_time() -> None:
    start = time.process_time()
    SampleOrder(10**9, 0)(np.arange(10**6))
    assert time.process_time() - start < 2


def test_random_stream_is_splitmix64() -> None:
    """Against the reference recurrence in Python integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # published: first output for seed 0
    for seed in (0, 1, -1, 2**64 - 1):
        state = mix((seed + 0x9E3779B97F4A7C15) & mask)
        for counter in range(5):
            state = (state + 0x9E3779B97F4A7C15) & mask
            assert int(random64(seed, counter)[0]) == mix(state)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SampleOrder(0, seed=0)
