"""Saving and resuming a run: weights, optimiser and counters at a step boundary, in the project's own format."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L

from llmstack.checkpoint import BackgroundWriter, Checkpoint, Mirror, RunFolder, write_checkpoint
from llmstack.checkpoint.ranks import on_every_rank
from llmstack.errors import Stopped, UserError
from llmstack.ranks import Ranks
from llmstack.training.callbacks.guards import SkippedSteps, set_counters
from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.datamodule import LanguageData
from llmstack.training.events import EventLog
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig
from llmstack.training.state import restore_masters, restore_state, share_of_state


class Checkpointing(StepCallback):
    """Saves when due and once at the end; restores before the first step.

    The learning rate, the order of the data and every random number are functions of the step, so the steps made and
    skipped, the samples seen, the weights and the optimiser state are all there is to save. Training waits while they
    are copied to host memory; a thread writes the copy. This callback must come last: what others do at a step is in
    its checkpoint.
    """

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        ranks: Ranks,
        metrics: Metrics,
        skipped: SkippedSteps,
        events: EventLog,
        mirror: Mirror | None,
    ) -> None:
        self.run, self.config, self.ranks, self.metrics, self.mirror = run, config, ranks, metrics, mirror
        self.skipped, self.events = skipped, events
        self._writer, self._writing_ranks = BackgroundWriter(), Ranks()
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._best = math.inf

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue from the checkpoint whose weights the module was built with."""
        assert isinstance(pl_module, LanguageModel)
        self._writing_ranks.connect()
        if pl_module.resume_from is not None:
            self._restore(trainer, pl_module, pl_module.resume_from)
        elif pl_module.initial_weights is not None:
            restore_masters(pl_module, trainer.optimizers[0], pl_module.initial_weights)

    def _restore(self, trainer: L.Trainer, module: LanguageModel, checkpoint: Checkpoint) -> None:
        data: LanguageData = trainer.datamodule  # type: ignore[attr-defined]
        state = checkpoint.state
        saved, present = state["data"], data.state(trainer)
        for name, now in present.items():
            if (then := saved.get(name)) != now:
                raise UserError(
                    f"{checkpoint.path} was trained on other data: its {name} is {then}, now {now}; use the same data, "
                    "or another --run.dir"
                )
        then, now = state["samples_per_step"], data.samples_per_step(trainer)
        if then != now:
            self.events.say(
                f"step {checkpoint.step}: from here a step has {now} samples, not {then}; the learning rate stays that "
                "of the step"
            )
        restore_state(module, trainer.optimizers[0], checkpoint)
        self.metrics.tokens_seen = state["tokens_seen"]
        self.skipped.total = state["skipped_steps"]
        data.first_step, data.first_sample = checkpoint.step + self.skipped.total, state["samples_seen"]
        if "stream" in state:
            data.stream_places = state["stream"][self.ranks.rank]
        best = self.run.best_checkpoint() if self.ranks.is_first else None
        self._best = self.ranks.from_first(best.state["val_loss"] if best is not None else math.inf)
        self._saved_step = checkpoint.step
        set_counters(trainer, checkpoint.step)

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Save where it is due."""
        step = trainer.global_step
        result = self.metrics.validated_at(step)
        is_best = self.config.keep_best and result is not None and result < self._best
        if is_best and result is not None:
            self._best = result
        if is_best or self._due_by_step(step) or self._due_by_time():
            self._save(trainer, module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The final checkpoint, on disk before the run ends."""
        assert isinstance(pl_module, LanguageModel)
        # Once more at the same step where others were skipped since: how many is part of the state.
        if trainer.global_step > self._saved_step or (trainer.global_step and self.skipped.in_a_row):
            self._save(trainer, pl_module)
        with _failing_alike():
            self._writer.wait()

    def _due_by_step(self, step: int) -> bool:
        every = (self.config.checkpoint_every, self.config.keep_every)
        return any(steps and step % steps == 0 for steps in every)

    def _due_by_time(self) -> bool:
        minutes = self.config.checkpoint_every_minutes
        # The clocks of the ranks differ; the first one's counts.
        return bool(minutes and self.ranks.from_first(time.monotonic() - self._saved_at > 60 * minutes))

    def _save(self, trainer: L.Trainer, module: LanguageModel) -> None:
        self.metrics.flush(trainer)
        step, data = trainer.global_step, trainer.datamodule  # type: ignore[attr-defined]
        weights, optimizer = share_of_state(module, trainer.optimizers[0], self.ranks)
        state: dict[str, Any] = {
            "tokens_seen": self.metrics.tokens_seen,
            "max_steps": trainer.max_steps,
            "seed": module.seed,
            "skipped_steps": self.skipped.total,
            "samples_seen": data.samples_seen(step + self.skipped.total),
            "samples_per_step": data.samples_per_step(trainer),
            "data": data.state(trainer),
        }
        if (places := data.places(step + self.skipped.total)) is not None:
            state["stream"] = self.ranks.gather(places)
        if (val_loss := self.metrics.validated_at(step)) is not None:
            state["val_loss"] = val_loss
        tokenizer: Path = self.run.path / "tokenizer"

        def write() -> None:
            write_checkpoint(
                self.run.checkpoint_path(step),
                step=step,
                config=module.config.to_dict(),
                weights=weights,
                optimizer=optimizer,
                state=state,
                tokenizer=tokenizer if tokenizer.is_dir() else None,
                ranks=self._writing_ranks,
            )
            on_every_rank(self._writing_ranks, self.run.path, prune)
            self._send_to_mirror()

        def prune() -> None:
            if self._writing_ranks.is_first:
                self.run.prune(self.config.keep_checkpoints, self.config.keep_every, self.config.keep_best)

        with _failing_alike():
            self._writer.submit(write)
        self._saved_step, self._saved_at = step, time.monotonic()
        self.metrics.restart_clock()

    def _send_to_mirror(self) -> None:
        """A store that is away for a while does not end the run: what it lacks is sent with the next checkpoint."""
        if self.mirror is not None and self._writing_ranks.is_first:
            try:
                self.mirror.send(self.run)
            except UserError as error:
                self.events.say(f"not in the mirror yet, but in {self.run.path}: {error}")


@contextmanager
def _failing_alike() -> Iterator[None]:
    """What could not be written ends all ranks, at the same point of each: one of them says why."""
    try:
        yield
    except UserError as error:
        raise Stopped(str(error), status=2) from error
