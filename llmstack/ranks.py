"""The processes of a run as one: small exchanges on the host that leave the devices' own communication alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """All ranks of a run, or the one there is. ``connect`` once the process group exists.

    Exchanges go over a gloo group of their own: numbers that live on the host never wait for a GPU's stream, and a
    background thread with a second ``Ranks`` does not get between two collectives of the training.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None

    def connect(self, patience: timedelta | None = None) -> None:
        """Called by every rank at the same point.

        Args:
            patience: with the slowest rank at an exchange; none: half an hour. One that dies is noticed at once.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=patience)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The small picklable ``value`` of every rank, in their order."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def from_first(self, value: Any) -> Any:
        """The value that rank 0 has."""
        return self.gather(value)[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the ranks, in fp64 and the same on all of them."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each number over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self._group is None:
            return list(values)
        exchanged = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(exchanged, op=operation, group=self._group)
        return exchanged.tolist()
