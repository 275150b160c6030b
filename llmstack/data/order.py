"""Which sample when: a full shuffle that is a pure function of (seed, i), without a table.

A Feistel network over the product of two moduli permutes ``range(a * b)``; walking its cycles until the value
is below ``n`` makes of it a permutation of ``range(n)`` (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). The round function is splitmix64 (Steele, Lea and Flood, 2014). Seeking costs O(1) time and
memory.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finaliser: a bijection of 64-bit integers that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random64(seed: ArrayLike, counter: ArrayLike) -> NDArray[np.uint64]:
    """Number ``counter`` of the splitmix64 stream that starts at ``seed`` (both broadcast, modulo 2^64)."""
    # At least one dimension: numpy wraps arrays silently but warns when a scalar overflows.
    base, step = np.atleast_1d(_to_uint64(seed)), np.atleast_1d(_to_uint64(counter))
    return mix64(mix64(base + _GOLDEN) + (step + np.uint64(1)) * _GOLDEN)


def _to_uint64(x: ArrayLike) -> NDArray[np.uint64]:
    return np.asarray(x % (1 << 64) if isinstance(x, int) else x).astype(np.uint64)


class SampleOrder:
    """Sample ``i`` of the run (0, 1, 2, ... without end) -> index of the data set.

    Epoch ``i // num_samples`` visits each index once, in a pseudo-random order of its own.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {num_samples}")
        self.num_samples = num_samples
        self.seed = seed
        side = math.isqrt(num_samples - 1) + 1
        self._side = np.uint64(side)  # side * side >= num_samples, and hardly more: cycles are short

    def __call__(self, samples: ArrayLike) -> NDArray[np.int64]:
        """Indices (int64, of the same shape) of the samples with these numbers."""
        samples = np.asarray(samples, dtype=np.int64)
        epoch, position = np.divmod(samples.reshape(-1), self.num_samples)
        keys = random64(self.seed, epoch)
        values = self._permute(position.astype(np.uint64), keys)
        while (outside := np.flatnonzero(values >= self.num_samples)).size:
            values[outside] = self._permute(values[outside], keys[outside])
        return values.astype(np.int64).reshape(samples.shape)

    def _permute(self, x: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(x, self._side)
        for round_ in range(_ROUNDS):
            # (round, right) numbers the draw, so that rounds share no random number.
            noise = mix64(keys + (right * np.uint64(_ROUNDS) + np.uint64(round_)) * _GOLDEN)
            left, right = right, (left + noise % self._side) % self._side
        return left * self._side + right
