"""Bringing the ranks together, and ending them all when one is lost."""

from __future__ import annotations

import os
from typing import Any

import lightning as L

from llmstack.checkpoint import read_checkpoint
from llmstack.errors import Stopped
from llmstack.ranks import Ranks
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig
from llmstack.training.strategies import RankLauncher
from llmstack.training.watchdog import Watchdog


class Together(StepCallback):
    """Connects the ranks, tells all of them what rank 0 found, and watches that each goes on."""

    def __init__(self, ranks: Ranks, config: RunConfig) -> None:
        self.ranks, self.config = ranks, config
        self.watchdog: Watchdog | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The process group exists, the model not yet."""
        assert isinstance(pl_module, LanguageModel)
        self.ranks.connect()
        found = pl_module.resume_from
        place = self.ranks.from_first(found and str(found.path))
        if place and not self.ranks.is_first:
            # Rank 0 has verified it.
            pl_module.resume_from = read_checkpoint(place, verify=False)
        self.watchdog = Watchdog(
            self.ranks.rank,
            self.ranks.world_size,
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            self.ranks.from_first,
            hang_seconds=60 * self.config.hang_minutes,
        )
        self.watchdog.start()
        if isinstance(launcher := trainer.strategy.launcher, RankLauncher):
            launcher.all_met.set()

    def beat(self, what: str) -> None:
        """Note that this rank goes on."""
        assert self.watchdog is not None
        self.watchdog.beat(what)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch begins."""
        self.beat(f"step {trainer.global_step + 1}")

    def on_validation_batch_start(self, *arguments: Any, **options: Any) -> None:
        """A batch of a validation begins."""
        self.beat("validation")

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """A step ends."""
        self.beat(f"the end of step {trainer.global_step}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The end that all ranks reach."""
        if self.watchdog is not None:
            self.watchdog.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """All ranks agree on a :class:`Stopped`; any other exception is one rank's own, and must end the others."""
        if self.watchdog is not None:
            if isinstance(exception, Stopped):
                self.watchdog.stop()
            else:
                self.watchdog.fail(exception)
