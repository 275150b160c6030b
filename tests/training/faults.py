"""Callbacks that look on, or do harm, inside a run started by its command (``trainer.callbacks`` of a YAML file).

They talk to the test through files of a folder, one of each rank where all speak.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from llmstack.training.module import LanguageModel


class Orders(L.Callback):
    """Waits at the beginning of each step for as long as the test wants.

    Args:
        folder: waits while it holds a file ``hold``, for ever where there is ``hang-<rank>``, and says the step in
            ``at-<rank>``.
        hold_at: the one step at which ``hold`` is looked at; null: all.
        pace: seconds that every step takes longer, so that a test can aim.
    """

    def __init__(self, folder: str, hold_at: int | None = None, pace: float = 0.0) -> None:
        self.folder, self.hold_at, self.pace = Path(folder), hold_at, pace

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(self.pace)
        step = trainer.global_step + 1
        (self.folder / f"at-{trainer.global_rank}").write_text(str(step))
        if self.hold_at in (None, step):
            while (self.folder / "hold").exists():
                time.sleep(0.02)
        while (self.folder / f"hang-{trainer.global_rank}").exists():
            time.sleep(1)


class Announce(L.Callback):
    """Says that a validation has begun, and gives the test time to act on it.

    Args:
        folder: gets a file ``validating``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_validation_batch_start(self, trainer: L.Trainer, *arguments: Any, **options: Any) -> None:
        if trainer.is_global_zero and not (self.folder / "validating").exists():
            (self.folder / "validating").touch()
            time.sleep(0.3)


class OwnHandler(L.Callback):
    """Handles USR1 by itself, as an experiment tracker may.

    Args:
        folder: gets a file ``handled``.
    """

    def __init__(self, folder: str) -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: (Path(folder) / "handled").touch())


class Record(L.Callback):
    """Writes down which samples each rank was given, and at the end what weights it holds.

    Args:
        folder: gets a line a micro-batch in ``samples-<rank>``, and the digest of the weights in ``weights-<rank>``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        with open(self.folder / f"samples-{trainer.global_rank}", "a") as file:
            file.write(json.dumps(batch["sample_ids"].tolist()) + "\n")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        digest = hashlib.sha256()
        for name, tensor in pl_module.decoder.state_dict().items():
            digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        (self.folder / f"weights-{trainer.global_rank}").write_text(digest.hexdigest())


class Poison(L.Callback):
    """Makes the hidden states of one rank NaN in the first micro-batch of some steps.

    Args:
        rank: the rank.
        attempts: those steps, counted from 1, the ones before that were skipped included.
    """

    def __init__(self, rank: int, attempts: list[int]) -> None:
        self.rank, self.attempts = rank, attempts
        self._now = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def poison(head: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            return (arguments[0] * float("nan"), *arguments[1:]) if self._now and head.training else None

        assert isinstance(pl_module, LanguageModel)
        pl_module.decoder.lm_head.register_forward_pre_hook(poison)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_due = batch["step"] + 1 in self.attempts and batch["micro_batch"] == 0
        self._now = is_due and trainer.global_rank == self.rank


class Untouched(L.Callback):
    """Compares all that a step could change before and after each that was skipped, on every rank.

    Args:
        folder: gets a line for each skipped step in ``untouched-<rank>``: its attempt and the names that differ.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._before: tuple[int, dict[str, Any]] | None = None
        self._attempt: int | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._attempt = batch["step"] + 1 if batch["micro_batch"] == 0 else None

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """The learning rate of the step is set by now, and nothing else done."""
        if self._attempt is not None:
            assert isinstance(pl_module, LanguageModel)
            now = everything(trainer, pl_module)
            self._compare(trainer, now)
            self._before, self._attempt = (self._attempt, now), None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        self._compare(trainer, everything(trainer, pl_module))

    def _compare(self, trainer: L.Trainer, now: dict[str, Any]) -> None:
        if self._before is None or self._before[1]["steps"] != now["steps"]:
            return
        attempt, before = self._before
        differ = [name for name in {**before, **now} if not equal(before.get(name), now.get(name))]
        with open(self.folder / f"untouched-{trainer.global_rank}", "a") as file:
            file.write(json.dumps([attempt, differ]) + "\n")


def everything(trainer: L.Trainer, module: LanguageModel) -> dict[str, Any]:
    """Copies of weights, masters, buffers, optimiser state, learning rate and step count of this rank."""
    tensors = dict(chain_named(module))
    optimizer: Any = trainer.optimizers[0]
    if module.zero is not None:
        from llmstack.training.sharding import _masters

        tensors |= {f"master {index}": tensor for index, tensor in enumerate(_masters(optimizer))}
        optimizer = optimizer.optimizer
    for index, state in enumerate(optimizer.state.values()):
        tensors |= {f"state {index} {key}": torch.as_tensor(value) for key, value in state.items()}
    copies: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    copies["learning rates"] = [group["lr"] for group in trainer.optimizers[0].param_groups]
    copies["steps"] = trainer.global_step
    return copies


def chain_named(module: LanguageModel) -> list[tuple[str, Tensor]]:
    """Parameters (of ZeRO-3 the shard) and buffers."""
    parameters = [(name, getattr(p, "ds_tensor", p)) for name, p in module.decoder.named_parameters()]
    return [*parameters, *module.decoder.named_buffers()]


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)
        )
    return type(one) is type(other) and one == other
