"""One row of numbers per optimiser step: to metrics.csv, to the loggers and to the progress display."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

from llmstack.accounting import CONVENTIONS, Convention, model_flops_per_token, model_flops_utilisation
from llmstack.checkpoint import MetricsFile, MetricsRow
from llmstack.ranks import Ranks
from llmstack.training.callbacks.profiling import Profiling
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel

SPIKE_WINDOW = 128
"""Steps whose losses a new one is compared with."""

SPIKE_MINIMUM = 16
"""Fewer losses than these say nothing about their spread."""


class Metrics(StepCallback):
    """Collects the row of each step and writes it (rank 0, whose clock counts; the loss is that of all ranks).

    A row is held back until the next step ends, a checkpoint is saved or the run ends, so that a validation at the
    same step lands in the same row. What is not training (validation, saving, the first step of a start, which
    compiles) is in no step's time and speed.
    """

    def __init__(self, file: MetricsFile, ranks: Ranks, profiling: Profiling | None) -> None:
        self.file, self.ranks, self.profiling = file, ranks, profiling
        self.tokens_seen = 0
        self.last_row: dict[str, Any] = {}
        self._pending: dict[str, Any] | None = None
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._validated: tuple[int, float] | None = None
        self._is_first_step = True
        self._flops_per_token: dict[Convention, int] = {}
        self.restart_clock()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clock of the first step starts."""
        super().on_train_start(trainer, pl_module)
        assert isinstance(pl_module, LanguageModel)
        if self.ranks.is_first:
            self._losses.extend(row["loss"] for row in self.file.read()[-SPIKE_WINDOW:])
        block_size = trainer.datamodule.block_size  # type: ignore[attr-defined]
        self._flops_per_token = {
            name: model_flops_per_token(pl_module.config, block_size, name) for name in CONVENTIONS
        }
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what was just done (validation, saving) out of the next step's time."""
        self._mark = time.perf_counter()
        self._spent = {"data_seconds": 0.0, "forward_backward_seconds": 0.0, "optimizer_seconds": 0.0}

    @contextmanager
    def stopped_clock(self) -> Iterator[None]:
        """Leave what is done inside out of the step's time."""
        began = time.perf_counter()
        yield
        self._mark += time.perf_counter() - began

    def _spend(self, on: str) -> None:
        now = time.perf_counter()
        self._spent[on] += now - self._mark
        self._mark = now

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Waiting for the batch ends."""
        if self.profiling is not None:
            self._mark = max(self._mark, self.profiling.written_at)
        self._spend("data_seconds")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forward and backward end; what ranks exchange meanwhile is in this, too."""
        if torch.cuda.is_available() and pl_module.device.type == "cuda":
            # The gradient's norm is read next, so waiting here costs nothing.
            torch.cuda.synchronize()
        self._spend("forward_backward_seconds")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The optimiser ends, where this batch ended a step."""
        self._spend("optimizer_seconds")
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Begin the row of an optimiser step that has just been made."""
        self.flush(trainer)
        step, tokens = trainer.global_step, int(batch["valid_tokens"])
        loss = self.ranks.sum([module.take_step_loss()])[0]
        self.tokens_seen += tokens
        seconds = sum(self._spent.values())
        row: dict[str, Any] = {
            "step": step,
            "tokens_seen": self.tokens_seen,
            "loss": loss,
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "grad_norm": module.gradient_norm,
            "spike_score": self._spike_score(loss),
            "step_seconds": seconds,
            **self._spent,
            "peak_memory_bytes": _peak_memory(module.device),
        }
        if not self._is_first_step:
            row.update(self._speed(tokens / seconds, module, trainer.precision))
        self._pending, self._is_first_step = row, False
        self.restart_clock()

    def _spike_score(self, loss: float) -> float | None:
        """How many standard deviations the loss lies above those of the last steps."""
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < SPIKE_MINIMUM:
            return None
        spread = statistics.pstdev(before)
        return (loss - statistics.fmean(before)) / spread if spread else 0.0

    def _speed(self, tokens_per_second: float, module: LanguageModel, precision: str) -> dict[str, float | None]:
        each = tokens_per_second / self.ranks.world_size
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        name = torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else "CPU"
        row: dict[str, float | None] = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": each,
        }
        for convention, flops_per_token in self._flops_per_token.items():
            flops = each * flops_per_token
            row[f"tflops_per_device_{convention}"] = flops / 1e12
            row[f"mfu_{convention}"] = model_flops_utilisation(flops, name, dtype)
        return row

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the validation to the row of its step."""
        assert isinstance(pl_module, LanguageModel)
        loss = float(trainer.callback_metrics["val_loss"])
        self._validated = trainer.global_step, loss
        if self._pending is not None:
            perplexity = float(trainer.callback_metrics["val_perplexity"])
            self._pending.update(val_loss=loss, val_perplexity=perplexity, val_tokens=pl_module.validation_tokens)
        self.restart_clock()

    def validated_at(self, step: int) -> float | None:
        """Validation loss after ``step``, if it is the last that was validated, and a number."""
        if self._validated is None or self._validated[0] != step or not math.isfinite(self._validated[1]):
            return None
        return self._validated[1]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the last row."""
        self.flush(trainer)

    def flush(self, trainer: L.Trainer) -> None:
        """Write the pending row."""
        if self._pending is None:
            return
        self.last_row, self._pending = self._pending, None
        if self.profiling is not None:
            self.last_row["communication_seconds"] = self.profiling.communication_seconds.get(self.last_row["step"])
        if not self.ranks.is_first:
            return
        self.file.append(MetricsRow(**self.last_row))
        for logger in trainer.loggers:
            values = {name: value for name, value in self.last_row.items() if name != "step" and value is not None}
            logger.log_metrics(values, step=self.last_row["step"])


def _peak_memory(device: torch.device) -> int:
    """Bytes that tensors took at most of a GPU's memory, or the process of a CPU's, since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
