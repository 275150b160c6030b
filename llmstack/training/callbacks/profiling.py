"""What a chosen optimiser step spends its time and memory on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

COMMUNICATION = ("nccl", "gloo:", "c10d::")
"""How the names of collectives begin: the kernels of NCCL, the work of gloo, the calls of either."""

TABLE_ROWS = 25


class Profiling(L.Callback):
    """Traces chosen steps, all micro-batches of each, on every rank; the other steps are left alone.

    A step leaves in ``<run>/logs/profile`` a trace for https://ui.perfetto.dev (``step-00000012-rank0.json.gz``), the
    operations that took longest (``.txt``) and, where asked for and there is a GPU, who allocated what
    (``.memory.pickle``, for https://pytorch.org/memory_viz). A traced step is slower than others, and writing follows.

    Args:
        run_path: the run folder.
        steps: steps to trace, counted from 1 as in metrics.csv.
        memory: record GPU memory, too.

    Attributes:
        communication_seconds: for each traced step, how long some collective was under way on this rank. They may
            overlap with computation, and waiting for slower ranks is in it.
        written_at: when the newest trace had been written, by ``time.perf_counter``: what came before is no training.
    """

    def __init__(self, run_path: Path, steps: Sequence[int], memory: bool = False) -> None:
        self.folder, self.steps, self.memory = run_path / "logs" / "profile", frozenset(steps), memory
        self.communication_seconds: dict[int, float] = {}
        self.written_at = 0.0
        self._profiler: profile | None = None
        self._step = 0
        self._began = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what cannot be had."""
        if self.memory and not torch.cuda.is_available():
            self.memory = False
            if trainer.is_global_zero:
                print("no GPU, so the profile holds no memory snapshot", file=sys.stderr, flush=True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start with the first micro-batch of a chosen step."""
        if self._profiler is not None or trainer.global_step + 1 not in self.steps:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._step = trainer.global_step + 1
        _finish_device_work()  # of the step before
        if self.memory:
            torch.cuda.memory._record_memory_history(stacks="python")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop with the last one, and write."""
        if self._profiler is None or trainer.global_step < self._step:
            return
        profiler, self._profiler = self._profiler, None
        _finish_device_work()
        seconds = time.perf_counter() - self._began
        profiler.stop()
        name = str(self.folder / f"step-{self._step:08d}-rank{trainer.global_rank}")
        if self.memory:
            torch.cuda.memory._dump_snapshot(f"{name}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(f"{name}.json.gz")
        communication = busy_seconds(_collectives(profiler.events()))
        self.communication_seconds[self._step] = communication
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
        Path(f"{name}.txt").write_text(
            f"step {self._step}, rank {trainer.global_rank}: {seconds:.3f} s, traced; "
            f"a collective was under way for {communication:.3f} s\n{table}\n"
        )
        self.written_at = time.perf_counter()


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of ``spans``, (start, end) in microseconds, was going on; in seconds."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total / 1e6


def _collectives(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Spans of the collectives: on the device where they run there, since the host merely launches those."""
    found = [event for event in events if event.name.startswith(COMMUNICATION)]
    on_device = [event for event in found if event.device_type != DeviceType.CPU]
    return [(event.time_range.start, event.time_range.end) for event in on_device or found]


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
