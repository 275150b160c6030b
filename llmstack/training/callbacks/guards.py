"""Training that cannot go silently wrong: steps that are skipped, ranks that drift apart."""

from __future__ import annotations

from itertools import chain
from typing import Any

import lightning as L
import torch
from torch import Tensor

from llmstack.errors import Stopped
from llmstack.ranks import Ranks
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.events import EventLog
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig


class SkippedSteps(L.Callback):
    """A step whose gradient is not finite leaves no trace but a line in the log and a count.

    It moves no weight, no optimiser state, no schedule and no statistic of a norm: for Lightning and for every other
    callback it was not there (this one must come first). Only the data goes on, so that the next attempt sees other
    samples.
    """

    def __init__(self, ranks: Ranks, config: RunConfig, events: EventLog) -> None:
        self.ranks, self.limit, self.events = ranks, config.abort_after_skipped, events
        self.total = 0
        """Steps skipped since the beginning of the run."""
        self.in_a_row = 0
        self._samples: list[int] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note which samples the step is made of."""
        if batch["micro_batch"] == 0:
            self._samples = []
        self._samples += batch["sample_ids"].tolist()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Undo Lightning's count of a step that was not made; too many in a row end the run."""
        assert isinstance(pl_module, LanguageModel)
        if batch["micro_batch"] + 1 < trainer.accumulate_grad_batches:
            return
        if pl_module.step_is_sound:
            self.in_a_row = 0
            return
        pl_module.take_step_loss()
        set_counters(trainer, trainer.global_step - 1)
        self.total += 1
        self.in_a_row += 1
        samples = sorted(chain.from_iterable(self.ranks.gather(self._samples)))
        self.events.say(
            f"step {trainer.global_step + 1} skipped: its gradient is not finite; samples "
            f"{', '.join(map(str, samples))} ({self.in_a_row} in a row, {self.total} in all)"
        )
        trainer.should_stop = trainer.should_stop or self.at_limit

    @property
    def at_limit(self) -> bool:
        """Whether the run can only go wrong from here."""
        return self.in_a_row >= self.limit


class SameWeights(StepCallback):
    """Compares what every rank must hold alike, by a checksum of its bits.

    Under ZeRO-3 that is what is not sharded: buffers and small parameters.
    """

    def __init__(self, ranks: Ranks, config: RunConfig) -> None:
        self.ranks, self.every = ranks, config.compare_ranks_every

    def on_step_end(self, trainer: L.Trainer, module: LanguageModel, batch: dict[str, Any]) -> None:
        """Compare where it is due.

        Raises:
            Stopped: the ranks differ.
        """
        if self.ranks.world_size == 1 or self.every is None or trainer.global_step % self.every:
            return
        state = {name: tensor for name, tensor in module.decoder.state_dict().items() if tensor.numel()}
        sums = torch.stack([checksum(tensor) for tensor in state.values()]).tolist()
        for rank, others in enumerate(self.ranks.gather(sums)):
            for name, own, other in zip(state, sums, others, strict=True):
                if own != other:
                    raise Stopped(
                        f"step {trainer.global_step}: ranks {self.ranks.rank} and {rank} hold different {name}; the "
                        "newest checkpoint is of an earlier step: look for a faulty device before going on from it",
                        status=1,
                    )


def checksum(tensor: Tensor) -> Tensor:
    """An integer that a change of any one element's bits changes, int64 scalar on the tensor's device."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)


def set_counters(trainer: L.Trainer, step: int) -> None:
    """Make Lightning believe that ``step`` optimiser steps were made, and nothing else happened."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready = steps.completed = step
    loop._batches_that_stepped = step
