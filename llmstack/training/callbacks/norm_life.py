"""What norm methods do while a model trains (calibration, gates, refreshes, removals), driven from one place."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from llmstack.ranks import Ranks
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel
from llmstack.training.probe import probe


class NormLife(StepCallback):
    """Measures what the norm method wants to know of a step's samples, and calls it after the step was applied.

    Once for a step and not per micro-batch, with sums over all of them and over the ranks. A skipped step is forgotten.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sums: dict[str, Tensor] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure the micro-batch with the weights that it will be trained with."""
        assert isinstance(pl_module, LanguageModel)
        if batch["micro_batch"] == 0:
            self._sums = {}
        decoder = pl_module.decoder
        method = pl_module.config.norm_method
        observed = method.observed(decoder, trainer.global_step + 1, trainer.max_steps)
        if not observed:
            return
        for name, sums in probe(decoder, batch, observed).items():
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Step the life."""
        step, steps = trainer.global_step, trainer.max_steps
        sums = self._of_all_ranks()
        module.config.norm_method.after_step(module.decoder, step, steps, module.gather, sums)

    def _of_all_ranks(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        sizes = [tensor.numel() for tensor in self._sums.values()]
        flat = torch.cat(list(self._sums.values())).cpu()
        parts = torch.tensor(self.ranks.sum(flat.tolist()), dtype=flat.dtype).split(sizes)
        return dict(zip(self._sums, parts, strict=True))
