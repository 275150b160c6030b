"""What a person sees of a training run: a progress bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.module import LanguageModel

SECONDS_BETWEEN_LINES = 10.0


class ProgressDisplay(L.Callback):
    """Loss, learning rate, tokens/s, tokens seen and time left."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown_step = 0
        self._last_line = 0.0
        self._began: tuple[float, int] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar where there is a terminal."""
        assert isinstance(pl_module, LanguageModel)
        if pl_module.compile_blocks:
            print("compiling in the first step (half a minute or more) ...", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the newest finished row."""
        self._show(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what a validation found."""
        loss = float(trainer.callback_metrics["val_loss"])
        perplexity = float(trainer.callback_metrics["val_perplexity"])
        self._print(f"step {trainer.global_step}: validation loss {loss:.4f}, perplexity {perplexity:.2f}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self._last_line = 0.0
        self._show(trainer)
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._close()

    def _show(self, trainer: L.Trainer) -> None:
        row = self.metrics.last_row
        if not row or row["step"] == self._shown_step:
            return
        self._shown_step = row["step"]
        # The time left is reckoned from the end of the first step, which compiles.
        self._began = self._began or (time.monotonic(), row["step"])
        speed = f"{row['tokens_per_second']:,.0f} tokens/s  " if "tokens_per_second" in row else ""
        text = f"loss {row['loss']:.4f}  lr {row['learning_rate']:.2e}  {speed}{row['tokens_seen']:,} tokens"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], description=text)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            left = _clock((trainer.max_steps - row["step"]) * self._seconds_per_step(row["step"]))
            print(f"step {row['step']}/{trainer.max_steps}  {text}  {left}", file=sys.stderr, flush=True)

    def _seconds_per_step(self, step: int) -> float:
        assert self._began is not None
        began, first = self._began
        return (time.monotonic() - began) / (step - first) if step > first else 0.0

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _clock(seconds: float) -> str:
    if not seconds:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d} left"
