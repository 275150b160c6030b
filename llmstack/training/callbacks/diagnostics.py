"""What goes on inside the model, every so many steps, to diagnostics.csv."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer

from llmstack.checkpoint import DiagnosticsFile, DiagnosticsRow
from llmstack.ranks import Ranks
from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.diagnostics import Quantity, diagnose, gradient_norms
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig


class Diagnostics(StepCallback):
    """Looks at the model after each step where it is due, with a few samples of the step.

    All ranks look, since a sharded model is whole only where all of them run it; what rank 0 sees, on its own samples,
    is written. Gradients are those of the whole step, before clipping. A skipped step leaves nothing.
    """

    def __init__(self, file: DiagnosticsFile, ranks: Ranks, config: RunConfig, metrics: Metrics) -> None:
        self.file, self.ranks, self.config, self.metrics = file, ranks, config, metrics
        self._gradients: dict[Quantity, float] = {}
        self._is_last_micro_batch = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Which micro-batch this is: under DeepSpeed each of them calls the optimiser."""
        self._is_last_micro_batch = batch["micro_batch"] + 1 == trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """All micro-batches and ranks are in the gradients now; DeepSpeed's are gone after the step."""
        assert isinstance(pl_module, LanguageModel)
        if self._is_last_micro_batch and self.config.diagnosis_due(trainer.global_step + 1):
            gradient_of = _gradient if pl_module.zero is None else _gradient_of_shards
            with self.metrics.stopped_clock():
                self._gradients = gradient_norms(pl_module.decoder, gradient_of)

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Look, and write."""
        step = trainer.global_step
        if not self.config.diagnosis_due(step):
            return
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        # In the dtype that the training computes with.
        with trainer.precision_plugin.forward_context():
            found = diagnose(
                module.decoder, batch, tokenizer and tokenizer.eos_id, attention=self.config.diagnose_attention
            )
        if self.ranks.is_first:
            both = {**found, **self._gradients}
            self.file.append([DiagnosticsRow(step, *quantity, value) for quantity, value in both.items()])
        self.metrics.restart_clock()


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def _gradient_of_shards(parameter: nn.Parameter) -> Tensor | None:
    """All ranks together, one parameter at a time: in all, one more exchange of the gradients."""
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)
