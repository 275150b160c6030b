"""Validation during training, on the run's own count of steps."""

from typing import Any

import lightning as L

from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig


class Validation(StepCallback):
    """Measures the held-out data after each step where it is due, and after the last.

    Lightning counts batches, also those of steps that were skipped; and a validation of its own after the end would
    build a second engine under DeepSpeed.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Run Lightning's validation loop, with what its own training loop does around it."""
        step = trainer.global_step
        if self.config.validation_due(step) or step == trainer.max_steps:
            module.zero_grad()
            first_iteration = trainer._logger_connector._first_loop_iter
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first_iteration
