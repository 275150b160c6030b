"""What norm methods do while a model trains (BHyT: refresh of c_attn), driven from one place."""

from typing import Any

import lightning as L

from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel


class NormLife(StepCallback):
    """Calls the norm method after each optimiser step that was applied, once and not per micro-batch."""

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Step the life."""
        step, steps = trainer.global_step, trainer.max_steps
        module.config.norm_method.after_step(module.decoder, step, steps, module.gather)
