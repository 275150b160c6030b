"""Small training runs under every strategy, whose insides the tests compare: ``make_jobs`` starts them.

Importing DeepSpeed takes longer than such a run, so one process of each rank makes many of them, one after the other:
``python -m tests.training.parity_worker FOLDER`` makes those of ``FOLDER/jobs.json`` and leaves what it saw in
``FOLDER/seen-<rank>.pt``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
import torch._dynamo
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.utils import counters

from llmstack.checkpoint import read_checkpoint, write_checkpoint
from llmstack.cli.configured import TRAINER_DEFAULTS, quiet_libraries
from llmstack.data import SampleOrder
from llmstack.model import ModelConfig
from llmstack.model.recompute import Recompute
from llmstack.ranks import Ranks
from llmstack.training.callbacks import NormLife, SkippedSteps
from llmstack.training.callbacks.guards import set_counters
from llmstack.training.callbacks.step import StepCallback
from llmstack.training.datamodule import LanguageData
from llmstack.training.events import EventLog
from llmstack.training.module import LanguageModel
from llmstack.training.optim import OptimizerConfig
from llmstack.training.rhythm import RunConfig
from llmstack.training.state import restore_state, share_of_state
from llmstack.training.step import token_losses
from llmstack.training.strategies import Ddp, Zero
from tests.training.launch import run_ranks

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
Precision = Literal["32-true", "bf16-mixed"]
VOCABULARY = 63
JOBS = "jobs.json"
NORM_OPTIONS: dict[str, dict[str, Any]] = {
    "fake_ln": {"start_mlp": 2, "start_qk": 5, "start_v": 8, "start_final": 14},
    "by_layer": {"layers": {"0": {"method": "bhyt"}}, "otherwise": {"method": "dyt"}},
}
"""Where the defaults would show nothing in 20 steps. Tapered norms taper from the first to the ninth."""
SHARD_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """One run. The global batch is that of two ranks, which a single process makes by itself."""

    strategy: Strategy = "single"
    norm: str = "rmsnorm"
    tied: bool = True
    accumulate: int = 1
    micro_batch_size: int = 2
    """Samples of each of two ranks."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    steps: int = 20
    clip: float | None = 0.1
    precision: Precision = "32-true"
    compile: bool = False
    activation_checkpointing: str | int = "none"
    valid_tokens: int | None = None
    """Of each step, in blocks of 1024; none: the generated copy task."""
    order: int = 0
    """The samples of a step, in this one of their orders: other numbers only sum them up otherwise."""
    broken_step: int | None = None
    """The loss of one rank is not a number in this step (from 0)."""
    save_at: int | None = None
    """Write a checkpoint after this step, and make the rest of the run once more from it."""


@dataclass
class Seen:
    """What a rank saw of a job. Tensors are whole, fp32 (buffers: their own), on every rank, by plain name."""

    initial: Tensors = field(default_factory=dict)
    """Weights and statistics before the first step."""
    gradients: Tensors = field(default_factory=dict)
    """Of the first step, all micro-batches and ranks, before clipping."""
    final: Tensors = field(default_factory=dict)
    """Weights and statistics after the last step."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step before clipping."""
    losses: list[float] = field(default_factory=list)
    """This rank's part of each step's loss."""
    recomputed_losses: list[float] = field(default_factory=list)
    """The same from token losses, summed in fp64 and divided by the labels counted."""
    own_tokens: list[int] = field(default_factory=list)
    """Valid labels that this rank had in each step."""
    normalisers: list[tuple[str, int]] = field(default_factory=list)
    """dtype and value of ``valid_tokens`` as each training step got it."""
    shards: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Under ZeRO-3, between two steps: whole size, size of this rank's shard, size of the parameter itself."""
    recompute: list[Recompute] = field(default_factory=list)
    """What each block computed again."""
    graphs: int = 0
    """Compiled."""
    around_broken_step: list[Tensors] = field(default_factory=list)
    """Weights, statistics and this rank's share of the optimiser state before it and after it."""
    saved: tuple[Tensors, Tensors] = field(default_factory=lambda: ({}, {}))
    """This rank's share of weights and optimiser state when the checkpoint was written."""
    restored: tuple[Tensors, Tensors] = field(default_factory=lambda: ({}, {}))
    """The same once it was read."""
    final_again: Tensors = field(default_factory=dict)
    """As ``final``, of the run that went on from the checkpoint."""


def make_jobs(folder: Path, jobs: Sequence[Job], timeout: float) -> None:
    """Make all of ``jobs``: first, without a process group, those of a single process, then those of two ranks.

    Args:
        folder: for what they leave; see :func:`read_jobs`.
        jobs: all different.
        timeout: seconds for each of the two kinds.
    """
    for ranks in (1, 2):
        part = [job for job in jobs if (job.strategy == "single") == (ranks == 1)]
        if part:
            place = folder / f"ranks-{ranks}"
            place.mkdir(parents=True)
            (place / JOBS).write_text(json.dumps([asdict(job) for job in part]))
            run_ranks("tests.training.parity_worker", str(place), ranks=ranks, timeout=timeout)


def read_jobs(folder: Path) -> dict[Job, list[Seen]]:
    """What each rank saw of the jobs made in ``folder``."""
    seen: dict[Job, list[Seen]] = {}
    for place in sorted(folder.glob("ranks-*")):
        jobs = [Job(**values) for values in json.loads((place / JOBS).read_text())]
        of_rank = [torch.load(path, weights_only=False) for path in sorted(place.glob("seen-*.pt"))]
        seen |= {job: [Seen(**one[index]) for one in of_rank] for index, job in enumerate(jobs)}
    return seen


class Model(LanguageModel):
    """With SGD where a job asks for it, and an ear on each training step."""

    def __init__(self, job: Job, seen: Seen, **options: Any) -> None:
        super().__init__(**options)
        self.job, self.seen = job, seen

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser of the job."""
        if self.job.optimizer == "adamw":
            return super().configure_optimizers()
        return torch.optim.SGD(self.decoder.parameters(), lr=self.optimizer_config.lr)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The plain one; before it, what it is given is noted."""
        normaliser, labels = batch["valid_tokens"], batch["labels"]
        self.seen.normalisers.append((str(normaliser.dtype), int(normaliser)))
        self._add(self.seen.own_tokens, int((labels != -100).sum()), batch)
        if self.job.valid_tokens is not None:
            with torch.no_grad():
                total = float(token_losses(self.decoder, batch).sum(dtype=torch.float64))
            self._add(self.seen.recomputed_losses, total / self.job.valid_tokens, batch)
        broken = batch["step"] == self.job.broken_step and self.global_rank == self.trainer.world_size - 1
        return super().training_step(batch, batch_idx) * (math.nan if broken else 1.0)

    def _add(self, sums: list[Any], value: Any, batch: dict[str, Any]) -> None:
        if batch["micro_batch"] == 0:
            sums.append(0)
        sums[-1] += value


class Reordered(SampleOrder):
    """The same global batches with their samples in another order."""

    def __init__(self, order: SampleOrder, global_batch_size: int, number: int) -> None:
        super().__init__(order.num_samples, order.seed)
        self.places = np.random.default_rng(number).permutation(global_batch_size)

    def __call__(self, samples: Any) -> NDArray[np.int64]:
        """As the base class."""
        size = len(self.places)
        return super().__call__(samples - samples % size + self.places[samples % size])


class CountedBlocks:
    """Blocks of 1024 random ids, so labelled that ``blocks`` of them in a row have ``valid`` valid labels."""

    block_size, vocab_size = 1024, VOCABULARY

    def __init__(self, blocks: int, valid: int) -> None:
        self.labelled = [min(max(valid - self.block_size * i, 0), self.block_size) for i in range(blocks)]
        assert sum(self.labelled) == valid

    def __len__(self) -> int:
        return 1000 * len(self.labelled)

    def __getitem__(self, index: int) -> Tensors:
        ids = torch.randint(self.vocab_size, (self.block_size + 1,), generator=torch.Generator().manual_seed(index))
        labels = ids[1:].clone()
        labels[self.labelled[index % len(self.labelled)] :] = -100
        return {"input_ids": ids[:-1], "labels": labels}

    def valid_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each sample."""
        return np.array([self.labelled[index % len(self.labelled)] for index in indices.tolist()])


class InOrder(SampleOrder):
    """Sample i is sample i."""

    def __call__(self, samples: Any) -> NDArray[np.int64]:
        """The same numbers."""
        return np.asarray(samples, dtype=np.int64)


class Data(LanguageData):
    """The data of a job."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(source="copy", **options)
        self.job = job

    def setup(self, stage: str) -> None:
        """The copy task, or blocks with a number of valid tokens."""
        super().setup(stage)
        if self.job.valid_tokens is not None:
            self._train = CountedBlocks(2 * self.job.micro_batch_size * self.job.accumulate, self.job.valid_tokens)
            self.vocab_size, self.block_size = self._train.vocab_size, self._train.block_size
            self._order = InOrder(len(self._train), 0)

    def train_dataloader(self) -> Any:
        """In the order of the job."""
        loader: Any = super().train_dataloader()
        sampler = loader.batch_sampler
        if self.job.order:
            sampler.order = Reordered(sampler.order, sampler.global_batch_size, self.job.order)
        return loader


class Recorder(StepCallback):
    """Writes down what a run shows at each point. The last of the callbacks."""

    def __init__(self, job: Job, seen: Seen, ranks: Ranks, checkpoint: Path, resume: bool) -> None:
        self.job, self.seen, self.ranks, self.checkpoint, self.resume = job, seen, ranks, checkpoint, resume
        self._is_last_micro_batch = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The process group exists, the model not yet."""
        self.ranks.connect()
        if self.resume:
            pl_module.resume_from = read_checkpoint(self.checkpoint)  # type: ignore[assignment]

    def on_fit_start(self, trainer: L.Trainer, pl_module: Model) -> None:  # type: ignore[override]
        """Resume."""
        if pl_module.resume_from is not None:
            restore_state(pl_module, trainer.optimizers[0], pl_module.resume_from)
            data: LanguageData = trainer.datamodule  # type: ignore[attr-defined]
            step = pl_module.resume_from.step
            data.first_step, data.first_sample = step, step * data.samples_per_step(trainer)
            set_counters(trainer, step)
            self.seen.restored = share_of_state(pl_module, trainer.optimizers[0], self.ranks)

    def on_train_start(self, trainer: L.Trainer, pl_module: Model) -> None:  # type: ignore[override]
        """Before the first step."""
        super().on_train_start(trainer, pl_module)
        self.seen.initial = dict(whole_state(pl_module))

    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: Model,  # type: ignore[override]
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Which micro-batch this is."""
        self._is_last_micro_batch = batch["micro_batch"] + 1 == trainer.accumulate_grad_batches
        broken = self.job.broken_step
        if broken is not None and batch["micro_batch"] == 0 and batch["step"] in (broken, broken + 1):
            _, optimizer = share_of_state(pl_module, trainer.optimizers[0], self.ranks)
            self.seen.around_broken_step.append(dict(whole_state(pl_module)) | optimizer)

    def on_after_backward(self, trainer: L.Trainer, pl_module: Model) -> None:  # type: ignore[override]
        """The gradient of the first step, reduced and not yet clipped."""
        if trainer.global_step == 0 and self._is_last_micro_batch:
            self.seen.gradients = dict(whole_gradients(pl_module))

    def on_step_end(self, trainer: L.Trainer, module: Model, batch: dict[str, Any]) -> None:  # type: ignore[override]
        """Numbers of the step."""
        self.seen.norms.append(module.gradient_norm)
        self.seen.losses.append(module.take_step_loss())
        if module.zero is not None and module.zero.stage == 3:
            self.seen.shards = {
                name: (parameter.ds_numel, parameter.ds_tensor.numel(), parameter.numel())
                for name, parameter in module.decoder.named_parameters()
            }
        if trainer.global_step == self.job.save_at and not self.resume:
            self._save(trainer, module)

    def _save(self, trainer: L.Trainer, module: Model) -> None:
        self.seen.saved = share_of_state(module, trainer.optimizers[0], self.ranks)
        weights, optimizer = self.seen.saved
        step, config = trainer.global_step, module.config.to_dict()
        write_checkpoint(
            self.checkpoint, step=step, config=config, weights=weights, optimizer=optimizer, ranks=self.ranks
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: Model) -> None:  # type: ignore[override]
        """After the last step."""
        self.seen.final = dict(whole_state(pl_module))
        self.seen.recompute = [block.recompute for block in pl_module.decoder.blocks]
        self.seen.graphs = counters["stats"]["unique_graphs"]


def whole_state(module: Model) -> Iterator[tuple[str, Tensor]]:
    """fp32 weights and persistent buffers, copied."""
    parameters = dict(module.decoder.named_parameters())
    if module.zero is None:
        yield from ((name, tensor.detach().clone()) for name, tensor in parameters.items())
    else:
        from deepspeed.utils import safe_get_full_fp32_param

        yield from ((name, safe_get_full_fp32_param(tensor).clone()) for name, tensor in parameters.items())
    for name, tensor in module.decoder.state_dict().items():
        if name not in parameters:
            yield name, tensor.clone()


def whole_gradients(module: Model) -> Iterator[tuple[str, Tensor]]:
    """Gradients over all ranks, copied."""
    for name, parameter in module.decoder.named_parameters():
        if module.zero is None:
            assert parameter.grad is not None
            yield name, parameter.grad.clone()
        else:
            from deepspeed.utils import safe_get_full_grad

            yield name, safe_get_full_grad(parameter).float().clone()


def strategy_of(job: Job) -> Any:
    """Lightning's argument."""
    if job.strategy == "single":
        return "auto"
    if job.strategy == "ddp":
        return Ddp()
    stage: Any = int(job.strategy[4])
    return Zero(stage=stage, offload=job.strategy.endswith("_offload"), config=SHARD_EVERYTHING if stage == 3 else None)


def run_job(job: Job, folder: Path) -> Seen:
    """Train, and watch."""
    folder.mkdir(exist_ok=True)
    seen = train(job, folder / "step")
    if job.save_at is not None:
        again = train(job, folder / "step", resume=True)
        seen.restored, seen.final_again = again.restored, again.final
    return seen


def train(job: Job, checkpoint: Path, resume: bool = False) -> Seen:
    """The run of a job, or what follows its checkpoint."""
    torch._dynamo.reset()
    counters.clear()
    seen, ranks = Seen(), Ranks()
    devices = 1 if job.strategy == "single" else 2
    # Nothing that two ranks could divide evenly.
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=33,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=47,
        max_position_embeddings=1024,
        norm={"method": job.norm, **NORM_OPTIONS.get(job.norm, {})},
        tie_word_embeddings=job.tied,
    )
    rate = 1.0 if job.optimizer == "sgd" else 3e-3
    optimizer = OptimizerConfig(lr=rate, schedule="constant", warmup_ratio=0)
    module = Model(
        job,
        seen,
        config=config,
        optimizer=optimizer,
        compile=job.compile,
        activation_checkpointing=job.activation_checkpointing,
    )
    data = Data(job, micro_batch_size=job.micro_batch_size * 2 // devices)
    skipped = SkippedSteps(ranks, RunConfig(), EventLog(checkpoint.parent / "events.log", ranks))
    trainer = L.Trainer(
        **TRAINER_DEFAULTS,
        accelerator="cpu",
        devices=devices,
        strategy=strategy_of(job),
        precision=job.precision,
        max_steps=job.steps,
        gradient_clip_val=job.clip,
        accumulate_grad_batches=job.accumulate,
        callbacks=[skipped, NormLife(ranks), Recorder(job, seen, ranks, checkpoint, resume)],
    )
    if isinstance(trainer.strategy, Zero):
        trainer.strategy.decide(trainer, data.micro_batch_size)
    trainer.fit(module, datamodule=data)
    return seen


def main(folder: Path) -> None:
    """All jobs of ``folder``."""
    quiet_libraries()
    jobs = [Job(**values) for values in json.loads((folder / JOBS).read_text())]
    seen = [vars(run_job(job, folder / f"job-{number}")) for number, job in enumerate(jobs)]
    torch.save(seen, folder / f"seen-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
