"""Stopping on request: a signal sets a flag, the end of the optimiser step acts on it."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import lightning as L


class StopOnSignal(L.Callback):
    """SIGTERM and Ctrl-C end the run after the present step, with a checkpoint; a second one ends it at once.

    Nothing is done inside the handler: it may interrupt a backward pass or a write.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._step = 0
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals over from Lightning, which would raise in the middle of things and save nothing."""
        self._step = trainer.global_step
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
        print(f"{self.received.name}: stopping after this step (once more: at once)", file=sys.stderr, flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop between two optimiser steps, never between two micro-batches of one."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            trainer.should_stop = trainer.should_stop or self.received is not None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
