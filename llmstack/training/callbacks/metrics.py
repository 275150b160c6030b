"""One row of numbers per optimiser step: to metrics.csv, to the loggers and to the progress display."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning as L

from llmstack.checkpoint import MetricsFile, MetricsRow
from llmstack.errors import Stopped
from llmstack.training.module import LanguageModel


class Metrics(L.Callback):
    """Collects the row of each step and writes it.

    A row is held back until the next step ends, a checkpoint is saved or the run ends, so that its tensors are read
    when the device has long finished with them, and so that a validation at the same step lands in the same row.
    """

    def __init__(self, file: MetricsFile) -> None:
        self.file = file
        self.tokens_seen = 0
        self.last_row: dict[str, Any] = {}
        self._pending: dict[str, Any] | None = None
        self._step = 0
        self._mark = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clock of the first step starts."""
        self._step = trainer.global_step
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what was just done (validation, saving) out of the next step's time."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin the row of an optimiser step that has just been made."""
        if trainer.global_step == self._step:
            return
        assert isinstance(pl_module, LanguageModel)
        self.flush(trainer)
        self._step = trainer.global_step
        self._pending = {
            "step": self._step,
            "valid_tokens": batch["valid_tokens"],
            "loss": pl_module.take_step_loss(),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "grad_norm": pl_module.gradient_norm,
            "step_seconds": time.perf_counter() - self._mark,
        }
        self.restart_clock()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the validation to the row of its step, on disk already where the run has ended."""
        assert isinstance(pl_module, LanguageModel)
        result = {
            "val_loss": float(trainer.callback_metrics["val_loss"]),
            "val_perplexity": float(trainer.callback_metrics["val_perplexity"]),
            "val_tokens": pl_module.validation_tokens,
        }
        if self._pending is not None:
            self._pending.update(result)
        else:
            self.file.amend_last(**result)
            self.last_row.update(result)
            self._log(trainer, result)
        self.restart_clock()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the last row."""
        self.flush(trainer)

    def flush(self, trainer: L.Trainer) -> None:
        """Write the pending row.

        Raises:
            Stopped: its loss or gradient is not finite.
        """
        if self._pending is None:
            return
        row, self._pending = self._pending, None
        tokens = int(row.pop("valid_tokens"))
        self.tokens_seen += tokens
        row["loss"], row["grad_norm"] = float(row["loss"]), float(row["grad_norm"])
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            raise Stopped(
                f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}, so nothing of it was saved "
                "(a lower learning rate or more warm-up may help)",
                status=1,
            )
        row["tokens_seen"], row["tokens_per_second"] = self.tokens_seen, tokens / row["step_seconds"]
        self.file.append(MetricsRow(**row))
        self.last_row = row
        self._log(trainer, {name: value for name, value in row.items() if name != "step"})

    def _log(self, trainer: L.Trainer, values: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self.last_row["step"])
