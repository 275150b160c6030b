"""Stopping on request: a signal has set a flag, the end of the optimiser step acts on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

from llmstack.errors import Stopped, UserError
from llmstack.ranks import Ranks
from llmstack.signals import StopSignals
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel


class StopOnSignal(StepCallback):
    """A signal ends the run after the present step, with a checkpoint.

    Nothing is done inside the handler: it may interrupt a backward pass, a collective or a write. All ranks stop at
    the same step, whichever of them was signalled.
    """

    def __init__(self, ranks: Ranks, signals: StopSignals) -> None:
        self.ranks, self.signals = ranks, signals
        self.received: signal.Signals | None = None
        """The one that all ranks stop for."""

    @contextmanager
    def listening(self, trainer: L.Trainer) -> Iterator[None]:
        """Note signals inside the context, which reaches from before the first step to after the last checkpoint.

        Lightning's own handlers stay out: in the midst of whatever is interrupted, they exchange a message between the
        ranks or save.

        Raises:
            Stopped: an error followed a signal, which had reached other processes of the run as well (a compiler, a
                data worker).
        """
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        with self.signals.while_training():
            try:
                yield
            except (Stopped, UserError):
                raise
            except Exception as error:
                if (received := self.signals.received) is None:
                    raise
                reason = (str(error).splitlines() or [""])[0]
                raise Stopped(
                    f"{received.name} interrupted the work ({type(error).__name__}: {reason}); the newest checkpoint "
                    "is whole, and the same command continues from it",
                    128 + received,
                ) from error

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make no step at all if a signal came before."""
        super().on_train_start(trainer, pl_module)
        self._stop_if_any_was_signalled(trainer)

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Stop between two optimiser steps, never between two micro-batches of one."""
        self._stop_if_any_was_signalled(trainer)

    def _stop_if_any_was_signalled(self, trainer: L.Trainer) -> None:
        number = int(self.ranks.max([self.signals.received or 0])[0])
        if number:
            self.received = signal.Signals(number)
            trainer.should_stop = True
