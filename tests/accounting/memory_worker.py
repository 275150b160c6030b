"""The bytes that training really holds, counted by PyTorch's profiler from the first allocation of a process.

``python -m tests.accounting.memory_worker FOLDER`` makes the run of ``FOLDER/job.json`` on this rank and leaves what it
counted in ``FOLDER/counted-<rank>.json``. No formula of ``llmstack.accounting`` takes part. One run a process: what one
leaves behind would be counted as given back in the next.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from llmstack.cli.configured import TRAINER_DEFAULTS, quiet_libraries
from llmstack.data import SampleOrder
from llmstack.model import ModelConfig
from llmstack.training.datamodule import LanguageData
from llmstack.training.module import LanguageModel
from llmstack.training.step import micro_batch_loss
from llmstack.training.strategies import Ddp, Zero
from tests.training.launch import run_ranks

JOB = "job.json"
MARK = "llmstack_mark_"


@dataclass(frozen=True)
class Job:
    """One run of three steps, of which the last is counted."""

    config: dict[str, Any] = field(default_factory=dict)
    """Of the model."""
    stage: int = 0
    ranks: int = 1
    offload: bool = False
    precision: str = "32-true"
    micro_batch_size: int = 4
    block_size: int = 64
    activation_checkpointing: str | int = "none"
    compile: bool = False
    bucket: int = 100_000
    """Elements; the real one would hide a small model."""
    accumulate: int = 1


@dataclass
class Counted:
    """Bytes of tensors that a rank held in its last step."""

    start: int = 0
    """Before it, when nothing of it exists."""
    forward: int = 0
    """When the loss is known and nothing has been given back."""
    backward: int = 0
    """When all gradients are there."""
    loss_peak: int = 0
    """Most in the forward pass."""
    backward_peak: int = 0
    """Most in the backward pass."""
    step_peak: int = 0
    """Most in the optimiser's step."""


def count_job(folder: Path, job: Job, timeout: float = 300) -> Counted:
    """Make ``job`` in processes of its own; what its first rank counted."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JOB).write_text(json.dumps(asdict(job)))
    run_ranks("tests.accounting.memory_worker", str(folder), ranks=job.ranks, timeout=timeout)
    return Counted(**json.loads((folder / "counted-0.json").read_text()))


class Blocks:
    """Blocks of random ids."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(self.vocab_size, (self.block_size + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:].clone()}

    def valid_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each sample: all."""
        return np.full(len(indices), self.block_size)


class Data(LanguageData):
    """Them as data of a run."""

    def __init__(self, job: Job) -> None:
        super().__init__(source="copy", micro_batch_size=job.micro_batch_size, num_workers=0)
        self.blocks = Blocks(job.block_size, job.config["vocab_size"])

    def setup(self, stage: str) -> None:
        """Instead of the task's samples."""
        super().setup(stage)
        self._train = self.blocks
        self.vocab_size, self.block_size = self.blocks.vocab_size, self.blocks.block_size
        self._order = SampleOrder(len(self._train), 0)


class Model(LanguageModel):
    """Marks the end of the forward pass."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The plain one."""
        with record_function(f"{MARK}{self.trainer.global_step}_start_{batch_idx}"):
            pass
        loss, _ = micro_batch_loss(self.decoder, batch)
        with record_function(f"{MARK}{self.trainer.global_step}_forward_{batch_idx}"):
            pass
        return loss * self.trainer.world_size


class Marks(L.Callback):
    """Marks the end of the backward pass and of the step."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All gradients are there."""
        with record_function(f"{MARK}{trainer.global_step}_backward"):
            pass

    def on_train_batch_end(self, trainer: L.Trainer, *unused: Any) -> None:
        """Made."""
        with record_function(f"{MARK}{trainer.global_step - 1}_end"):
            pass


def run_job(job: Job) -> Counted:
    """Train three steps, counting."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = Model(
            config=ModelConfig.from_dict(job.config),
            compile=job.compile,
            activation_checkpointing=job.activation_checkpointing,  # type: ignore[arg-type]
        )
        data = Data(job)
        strategy: Any = "auto"
        if job.stage:
            sizes = {"reduce_bucket_size": job.bucket, "allgather_bucket_size": job.bucket}
            stage3 = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": job.bucket}
            own = {"zero_optimization": {**sizes, **(stage3 if job.stage == 3 else {})}}
            strategy = Zero(stage=job.stage, offload=job.offload, config=own)  # type: ignore[arg-type]
        elif job.ranks > 1:
            strategy = Ddp()
        trainer = L.Trainer(
            **TRAINER_DEFAULTS,
            accelerator="cpu",
            devices=job.ranks,
            strategy=strategy,
            precision=job.precision,  # type: ignore[arg-type]
            max_steps=3,
            gradient_clip_val=1.0,
            accumulate_grad_batches=job.accumulate,
            callbacks=[Marks()],
        )
        if isinstance(trainer.strategy, Zero):
            trainer.strategy.decide(trainer, data.micro_batch_size)
        trainer.fit(module, datamodule=data)
    return _read(profiler, job.accumulate)


def _read(profiler: Any, accumulate: int) -> Counted:
    """The curve of live bytes, cut at the marks."""
    marks, changes = {}, []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(MARK):
            marks[event.name().removeprefix(MARK)] = event.start_ns()
    changes.sort()
    times = np.array([time for time, _ in changes])
    live = np.cumsum([change for _, change in changes])

    def at(time: int) -> int:
        return int(live[np.searchsorted(times, time) - 1])

    def most(start: int, end: int) -> int:
        return int(live[np.searchsorted(times, start) - 1 : np.searchsorted(times, end)].max())

    batches = range(3 * accumulate)[2 * accumulate :]
    start, forward = marks[f"2_start_{batches[-1]}"], marks[f"2_forward_{batches[-1]}"]
    backward, end = marks["2_backward"], marks["2_end"]
    return Counted(
        at(start), at(forward), at(backward), most(start, forward), most(forward, backward), most(backward, end)
    )


def main(folder: Path) -> None:
    """The job of ``folder``."""
    quiet_libraries()
    counted = run_job(Job(**json.loads((folder / JOB).read_text())))
    (folder / f"counted-{os.environ['RANK']}.json").write_text(json.dumps(asdict(counted)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
