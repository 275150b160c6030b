"""Questions to the model in the middle of its training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch

from llmstack.model import Llama
from llmstack.model.norms.fold import inference_copy
from llmstack.ranks import Ranks
from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.callbacks.together import Together
from llmstack.training.events import EventLog
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig


class Evaluate(Protocol):
    """What asks."""

    def __call__(self, model: Llama, step: int, ranks: Ranks, beat: Callable[[], None]) -> Mapping[str, float]:
        """Figures by name, on every rank.

        Args:
            model: the weights after ``step``, in evaluation mode, not compiled.
            step: optimiser steps made.
            ranks: all of which call this together.
            beat: to be called now and then, as a sign of life.
        """


class Evaluation(StepCallback):
    """Evaluates after each step where it is due, on modules of its own over the weights that train.

    The training's compiled graphs are not touched and its random numbers are put back, so a run goes on as if nobody
    had asked.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        ranks: Ranks,
        config: RunConfig,
        metrics: Metrics,
        together: Together,
        events: EventLog,
    ) -> None:
        self.evaluate, self.ranks, self.config = evaluate, ranks, config
        self.metrics, self.together, self.events = metrics, together, events

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Ask, and write what came of it."""
        step = trainer.global_step
        if not self.config.evaluation_due(step):
            return
        with same_random_numbers():
            found = self.evaluate(inference_copy(module.decoder), step, self.ranks, self._beat)
        if self.ranks.is_first:
            self.events.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
            for logger in trainer.loggers:
                logger.log_metrics({f"evaluation/{name}": value for name, value in found.items()}, step=step)
        self.metrics.restart_clock()

    def _beat(self) -> None:
        self.together.beat("an evaluation")


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Afterwards every generator of random numbers stands where it stood: lm-eval seeds all of them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)
