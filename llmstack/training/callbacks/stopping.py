"""Stopping on request: a signal sets a flag, the end of the optimiser step acts on it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning as L

from llmstack.training.callbacks.step import StepCallback
from llmstack.training.module import LanguageModel
from llmstack.training.ranks import Ranks


class StopOnSignal(StepCallback):
    """SIGTERM and Ctrl-C end the run after the present step, with a checkpoint; a second one ends it at once.

    Nothing is done inside the handler: it may interrupt a backward pass, a collective or a write. All ranks stop at
    the same step, whichever of them was signalled.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.received: signal.Signals | None = None
        self._speaks = True

    @contextmanager
    def listening(self, trainer: L.Trainer) -> Iterator[None]:
        """Note signals inside the context, which reaches from before the first step to after the last checkpoint.

        Lightning's own handlers stay out: in the midst of whatever is interrupted, they exchange a message between the
        ranks or save.
        """
        self._speaks = trainer.is_global_zero
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
        if self._speaks:
            text = f"{self.received.name}: stopping when the step is done (once more: at once)"
            print(text, file=sys.stderr, flush=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make no step at all if a signal came before."""
        super().on_train_start(trainer, pl_module)
        self._stop_if_any_was_signalled(trainer)

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Stop between two optimiser steps, never between two micro-batches of one."""
        self._stop_if_any_was_signalled(trainer)

    def _stop_if_any_was_signalled(self, trainer: L.Trainer) -> None:
        number = int(self.ranks.max([self.received or 0])[0])
        if number:
            self.received = signal.Signals(number)
            trainer.should_stop = True
