"""Batches of a run: which samples each rank sees in each micro-batch of each optimiser step.

A sampler yields lists of :class:`SampleKey`; :class:`KeyedSamples` looks the keys up in a data set;
:func:`collate` makes the batch. The number of valid tokens of the whole optimiser step rides in the keys, so
that every rank and micro-batch knows the divisor of its loss before the step begins::

    blocks = PackedBlocks(prepared, "train", block_size)
    sampler = StepBatchSampler(blocks, SampleOrder(len(blocks), seed), micro_batch_size=4, ...)
    loader = DataLoader(KeyedSamples(blocks), batch_sampler=sampler, collate_fn=collate, num_workers=2)
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from llmstack.data.packing import IGNORE_INDEX


class SampleSource(Protocol):
    """What the samplers need of a data set (:class:`PackedBlocks`, :class:`TaskDataset`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]: ...

    def valid_tokens(self, indices: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Labels other than -100 of each of these samples."""


class Order(Protocol):
    """Which sample when (:class:`SampleOrder`, :class:`MixtureOrder`)."""

    num_samples: int

    def __call__(self, samples: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Indices of the samples with these numbers in the run."""


class SampleKey(NamedTuple):
    """A sample within a run. ``sample_id`` is its number in the run, -1 on a filler that is not scored."""

    dataset_index: int
    sample_id: int
    step: int
    micro_batch: int
    valid_tokens: int


class KeyedSamples(Dataset[dict[str, Any]]):
    """A data set that is asked by :class:`SampleKey` and returns the key's fields with the sample."""

    def __init__(self, samples: SampleSource) -> None:
        self.samples = samples

    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        sample = self.samples[key.dataset_index]
        if key.sample_id < 0:
            sample = sample | {"labels": torch.full_like(sample["labels"], IGNORE_INDEX)}
        return sample | {"key": key}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack the samples of a micro-batch.

    Returns ``input_ids`` and ``labels`` (and ``document_ids``) int64 [batch, seq]; ``sample_ids`` int64
    [batch]; ``valid_tokens``, an int64 scalar tensor: the labels other than -100 in the whole optimiser step,
    over all ranks and micro-batches (an integer, for strategies cast float tensors to bf16); ``step`` and
    ``micro_batch``, ints.
    """
    key: SampleKey = samples[0]["key"]
    batch: dict[str, Any] = {
        name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "key"
    }
    return batch | {
        "sample_ids": torch.tensor([sample["key"].sample_id for sample in samples]),
        "valid_tokens": torch.tensor(key.valid_tokens),
        "step": key.step,
        "micro_batch": key.micro_batch,
    }


class StepBatchSampler(Sampler[list[SampleKey]]):
    """The micro-batches of one rank, step after step.

    A step takes the next G samples of the run, where G is micro_batch_size times accumulate times world_size, dealt in
    runs of ``micro_batch_size``: to the ranks first, then to the next micro-batch. So the sequence of global batches
    depends on G alone; a run continues at ``start_step`` and ``start_sample`` on another number of ranks, and with
    another G no sample is seen twice or left out (default: G was the same in all steps before). Without ``num_steps``
    it has no end and no length; else it is that many steps long.
    """

    def __init__(
        self,
        samples: SampleSource,
        order: Order,
        micro_batch_size: int,
        accumulate: int = 1,
        world_size: int = 1,
        rank: int = 0,
        start_step: int = 0,
        num_steps: int | None = None,
        start_sample: int | None = None,
    ) -> None:
        if order.num_samples != len(samples):
            raise ValueError(f"an order of {order.num_samples} for {len(samples)} samples")
        if min(micro_batch_size, accumulate, world_size) < 1 or not 0 <= rank < world_size:
            raise ValueError(f"{micro_batch_size=}, {accumulate=}, {world_size=}, {rank=}")
        self.samples, self.order = samples, order
        self.micro_batch_size, self.accumulate = micro_batch_size, accumulate
        self.world_size, self.rank = world_size, rank
        self.start_step, self.num_steps = start_step, num_steps
        self.start_sample = start_step * self.global_batch_size if start_sample is None else start_sample

    @property
    def global_batch_size(self) -> int:
        """Samples an optimiser step, over all ranks and micro-batches."""
        return self.micro_batch_size * self.accumulate * self.world_size

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("a run without num_steps has no length")
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for step in count(self.start_step):
            if self.num_steps is not None and step >= self.start_step + self.num_steps:
                return
            first = self.start_sample + (step - self.start_step) * self.global_batch_size
            sample_ids = np.arange(first, first + self.global_batch_size)
            indices = self.order(sample_ids)
            valid = int(self.samples.valid_tokens(indices).sum())
            dealt = np.stack([indices, sample_ids], axis=-1).reshape(
                self.accumulate, self.world_size, self.micro_batch_size, 2
            )
            for micro_batch, mine in enumerate(dealt[:, self.rank].tolist()):
                yield [SampleKey(index, sample, step, micro_batch, valid) for index, sample in mine]


class EvaluationBatchSampler(Sampler[list[SampleKey]]):
    """Every sample once, in order, over all ranks; ``valid_tokens`` counts one batch of every rank together.

    All ranks make the same number of batches of the same size, as sharded strategies and compiled graphs need: what
    is missing at the end is filled up with sample 0, every label -100 and ``sample_id`` -1.
    """

    def __init__(self, samples: SampleSource, batch_size: int, world_size: int = 1, rank: int = 0) -> None:
        if min(batch_size, world_size) < 1 or not 0 <= rank < world_size:
            raise ValueError(f"{batch_size=}, {world_size=}, {rank=}")
        self.samples, self.batch_size = samples, batch_size
        self.world_size, self.rank = world_size, rank

    def __len__(self) -> int:
        return -(-len(self.samples) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[SampleKey]]:
        stride = self.batch_size * self.world_size
        for step in range(len(self)):
            indices = np.arange(step * stride, min((step + 1) * stride, len(self.samples)))
            valid = int(self.samples.valid_tokens(indices).sum())
            mine = np.array_split(indices, self.world_size)[self.rank].tolist()
            keys = [SampleKey(i, i, step, 0, valid) for i in mine]
            yield keys + [SampleKey(0, -1, step, 0, valid)] * (self.batch_size - len(keys))
