"""Time, bytes, and the copy that says what the memory of a device gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Run = Callable[[], object]

_FLUSH_BYTES, _FLUSHES = 2**29, 4
"""More than the caches of a GPU hold, and often enough for the host to run ahead of it."""


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def seconds(self, runs: Sequence[Run]) -> list[float]:
        """Time of each of ``runs``, made once, in this order."""
        return [_on_cpu(run) for run in runs] if self._flushed is None else self._on_gpu(runs, self._flushed)

    def _on_gpu(self, runs: Sequence[Run], flushed: Tensor) -> list[float]:
        """The device's own time with cold caches: while it overwrites a buffer, the host launches what is timed."""
        marks = []
        for run in runs:
            for _ in range(_FLUSHES):
                flushed.fill_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize(flushed.device)
        return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _on_cpu(run: Run) -> float:
    """Caches as the calls before left them: emptied, they would be empty of the host's own code, too."""
    began = time.perf_counter()
    result = run()
    elapsed = time.perf_counter() - began
    del result  # freeing is not timed
    return elapsed


class Copy:
    """A copy between two tensors: the least that an operation can take which reads one such and writes another.

    Args:
        like: gives shape, dtype and device; the tensors are the copy's own.
    """

    def __init__(self, like: Tensor) -> None:
        self.source = like.detach().clone()
        self.target = torch.empty_like(self.source)
        self.bytes = bytes_of([self.source, self.target])

    def __call__(self) -> None:
        self.target.copy_(self.source)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all ``tensors`` together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Read:
    """A sum over a buffer too large for any cache: the least that an operation can take which reads so many bytes.

    Args:
        device: whose memory is read.
    """

    bytes = 2**30

    def __init__(self, device: torch.device) -> None:
        self._parts = [torch.ones(self.bytes // 32, device=device) for _ in range(8)]

    def __call__(self) -> list[Tensor]:
        return [part.sum() for part in self._parts]
