"""A mixture gives each set its share, each of its samples once an epoch, and any sample by its number alone."""

import numpy as np
import pytest

from llmstack.data.mixture import ROUND, MixtureOrder, whole_shares
from llmstack.errors import UserError

SIZES, WEIGHTS = [70, 1300, 29], [0.5, 0.3, 0.2]


@pytest.mark.parametrize("first", [0, 1, 777, 5_000, 10**12 + 321])
def test_shares_are_exact_over_a_round_wherever_it_starts(first: int) -> None:
    order = MixtureOrder(SIZES, WEIGHTS, seed=5)
    whole = order(np.arange(first // ROUND * ROUND, first // ROUND * ROUND + ROUND))
    sets = np.searchsorted(np.cumsum(SIZES), whole, side="right")
    assert np.bincount(sets).tolist() == [500, 300, 200]
    near = np.searchsorted(np.cumsum(SIZES), order(np.arange(first, first + 100)), side="right")
    # Spread over the round: of 100 samples about as many as the share (six standard deviations).
    assert np.all(np.abs(np.bincount(near, minlength=3) - [50, 30, 20]) < 30)


def test_each_set_comes_epoch_after_epoch_in_new_orders() -> None:
    order = MixtureOrder(SIZES, WEIGHTS, seed=5)
    indices = order(np.arange(20 * ROUND))
    starts = [0, *np.cumsum(SIZES)]
    for start, size in zip(starts, SIZES, strict=False):
        own = indices[(indices >= start) & (indices < start + size)] - start
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) > 3
        assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (len(epochs), 1)))
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    order = MixtureOrder(SIZES, WEIGHTS, seed=5)
    together = order(np.arange(3000))
    assert [int(order(i)) for i in range(1990, 2010)] == together[1990:2010].tolist()
    assert (MixtureOrder(SIZES, WEIGHTS, seed=6)(np.arange(3000)) != together).mean() > 0.5
    assert order(np.arange(12).reshape(3, 4)).shape == (3, 4)


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 34_567])
def test_what_was_given_is_counted(count: int) -> None:
    order = MixtureOrder(SIZES, WEIGHTS, seed=1)
    sets = np.searchsorted(np.cumsum(SIZES), order(np.arange(count)), side="right")
    assert order.count(count) == np.bincount(sets, minlength=3).tolist()


def test_shares_are_whole_and_none_is_left_out() -> None:
    assert whole_shares([1, 1, 1]) == [334, 333, 333]
    assert whole_shares([7, 3]) == [700, 300]
    assert whole_shares([1e9, 1, 1]) == [998, 1, 1]
    assert sum(whole_shares([0.123, 0.456, 0.789, 1e-6])) == ROUND
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="must be positive"):
            whole_shares([1, bad])
