"""What norm methods do while a model trains (BHyT: refresh of c_attn), driven from one place."""

from typing import Any

import lightning as L

from llmstack.training.module import LanguageModel


class NormLife(L.Callback):
    """Calls the norm method after each optimiser step that was applied."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resumed runs start where their counters stand."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Step the life once per optimiser step, not once per micro-batch."""
        assert isinstance(pl_module, LanguageModel)
        if trainer.global_step > self._last_step:
            self._last_step = trainer.global_step
            pl_module.config.norm_method.after_step(pl_module.decoder, trainer.global_step, trainer.max_steps)
