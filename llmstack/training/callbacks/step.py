"""Callbacks that act between two optimiser steps."""

from __future__ import annotations

from typing import Any

import lightning as L

from llmstack.training.module import LanguageModel


class StepCallback(L.Callback):
    """Calls ``on_step_end`` once for each optimiser step that was really made, whatever the micro-batches."""

    _last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resumed runs start where their counters stand."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Find out whether this batch ended a step."""
        assert isinstance(pl_module, LanguageModel)
        if trainer.global_step > self._last_step:
            self._last_step = trainer.global_step
            self.on_step_end(trainer, pl_module, batch)

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """After optimiser step ``trainer.global_step``; ``batch`` is its last micro-batch."""
        raise NotImplementedError
