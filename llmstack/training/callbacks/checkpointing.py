"""Saving and resuming a run: weights, optimiser and counters at a step boundary, in the project's own format."""

from __future__ import annotations

import time
from typing import Any

import lightning as L

from llmstack.checkpoint import Checkpoint, RunFolder, write_checkpoint
from llmstack.errors import UserError
from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.datamodule import LanguageData
from llmstack.training.module import LanguageModel
from llmstack.training.optim import optimizer_tensors, restore_optimizer
from llmstack.training.rhythm import RunConfig


class Checkpointing(L.Callback):
    """Saves when due and once at the end; restores before the first step.

    The learning rate, the order of the data and every random number are functions of the step, so the step itself,
    the weights and the optimiser state are all there is to save.
    """

    def __init__(self, run: RunFolder, config: RunConfig, metrics: Metrics) -> None:
        self.run, self.config, self.metrics = run, config, metrics
        self._saved_step = 0
        self._saved_at = time.monotonic()
        self._step = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue from the checkpoint whose weights the module was built with."""
        assert isinstance(pl_module, LanguageModel)
        if pl_module.resume_from is not None:
            self._restore(trainer, pl_module, pl_module.resume_from)
        self._step = self._saved_step = trainer.global_step

    def _restore(self, trainer: L.Trainer, module: LanguageModel, checkpoint: Checkpoint) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        saved, present = checkpoint.state["data"], _data_state(trainer, data)
        for name in present:
            if saved[name] != present[name]:
                raise UserError(
                    f"{checkpoint.path} was trained on other data: its {name} is {saved[name]}, now {present[name]}; "
                    "use the same data and batch, or another --run.dir"
                )
        restore_optimizer(module.decoder, trainer.optimizers[0], checkpoint.optimizer())
        self.metrics.tokens_seen = checkpoint.state["tokens_seen"]
        # Lightning's counters: steps made, and batches seen (they decide when a validation is due).
        loop = trainer.fit_loop.epoch_loop
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = checkpoint.step
        loop.automatic_optimization.optim_progress.optimizer.step.total.ready = checkpoint.step
        loop._batches_that_stepped = checkpoint.step
        batches = checkpoint.step * trainer.accumulate_grad_batches
        for counter in ("ready", "started", "processed", "completed"):
            setattr(loop.batch_progress.total, counter, batches)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a step, unless its validation comes first."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not self.config.validation_due(self._step):
            self._save_if_due(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save after the validation of a step, so that a resumed run need not repeat it."""
        if trainer.state.fn == "fit":
            self._save_if_due(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The final checkpoint."""
        if trainer.global_step > self._saved_step:
            self._save(trainer, pl_module)

    def _save_if_due(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        minutes = self.config.checkpoint_every_minutes
        by_step = self.config.checkpoint_every and self._step % self.config.checkpoint_every == 0
        by_time = minutes and time.monotonic() - self._saved_at > 60 * minutes
        if by_step or by_time:
            self._save(trainer, pl_module)

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        self.metrics.flush(trainer)
        step = trainer.global_step
        data = trainer.datamodule  # type: ignore[attr-defined]
        tokenizer = self.run.path / "tokenizer"
        write_checkpoint(
            self.run.checkpoint_path(step),
            step=step,
            config=pl_module.config.to_dict(),
            weights=pl_module.decoder.state_dict(),
            optimizer=optimizer_tensors(pl_module.decoder, trainer.optimizers[0]),
            state={
                "tokens_seen": self.metrics.tokens_seen,
                "max_steps": trainer.max_steps,
                "seed": pl_module.seed,
                "data": _data_state(trainer, data),
            },
            tokenizer=tokenizer if tokenizer.is_dir() else None,
        )
        self.run.prune(self.config.keep_checkpoints)
        self._saved_step, self._saved_at = step, time.monotonic()
        self.metrics.restart_clock()


def _data_state(trainer: L.Trainer, data: LanguageData) -> dict[str, Any]:
    """What makes up the sequence of samples: a resumed run must find the same."""
    return {
        "fingerprint": data.fingerprint,
        "block_size": data.block_size,
        "order_seed": data.seed,
        "samples_per_step": data.micro_batch_size * trainer.accumulate_grad_batches * trainer.world_size,
    }
