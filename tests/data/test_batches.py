"""One global sequence of batches, whatever the ranks, micro-batches and workers; counts exact."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from llmstack.data import (
    EvaluationBatchSampler,
    KeyedSamples,
    PackedBlocks,
    PreparedData,
    SampleOrder,
    StepBatchSampler,
    TaskDataset,
    collate,
)

TASK = TaskDataset("sort", "train", num_samples=50, seed=4)
ORDER = SampleOrder(len(TASK), seed=9)
LAYOUTS = [(24, 1, 1), (6, 4, 1), (6, 2, 2), (6, 1, 4), (4, 2, 3), (1, 3, 8), (2, 12, 1)]


def batches(sampler: Any, samples: Any = TASK, workers: int = 0) -> Iterator[dict[str, Any]]:
    return iter(DataLoader(KeyedSamples(samples), batch_sampler=sampler, collate_fn=collate, num_workers=workers))


def steps_of(layout: tuple[int, int, int], start: int, num_steps: int) -> list[list[dict[str, Any]]]:
    """For each step all batches of all ranks, in the order micro-batch, rank."""
    micro, accumulate, world = layout
    ranks = [
        list(batches(StepBatchSampler(TASK, ORDER, micro, accumulate, world, rank, start, num_steps)))
        for rank in range(world)
    ]
    assert all(len(rank) == num_steps * accumulate for rank in ranks)
    in_order = [batch for together in zip(*ranks, strict=True) for batch in together]
    size = accumulate * world
    return [in_order[i : i + size] for i in range(0, len(in_order), size)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_global_sequence_does_not_depend_on_the_layout(layout: tuple[int, int, int]) -> None:
    """Over several epochs of 50 samples, none of which is a whole number of batches of 24."""
    for number, step in enumerate(steps_of(layout, start=0, num_steps=7)):
        ids = torch.cat([batch["sample_ids"] for batch in step])
        assert ids.tolist() == list(range(24 * number, 24 * (number + 1)))
        expected = torch.stack([TASK[int(i)]["input_ids"] for i in ORDER(ids.numpy())])
        assert torch.equal(torch.cat([batch["input_ids"] for batch in step]), expected)
        assert {batch["step"] for batch in step} == {number}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_valid_tokens_are_those_of_the_whole_step(layout: tuple[int, int, int]) -> None:
    counts = set()
    for step in steps_of(layout, start=3, num_steps=4):
        true = sum(int((batch["labels"] != -100).sum()) for batch in step)
        assert {int(batch["valid_tokens"]) for batch in step} == {true}
        assert all(batch["valid_tokens"].dtype == torch.int64 for batch in step)
        assert all(batch["valid_tokens"].ndim == 0 for batch in step)
        assert [batch["micro_batch"] for batch in step] == [m for m in range(layout[1]) for _ in range(layout[2])]
        counts.add(true)
    assert len(counts) > 1


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_batches(workers: int, embedded: PreparedData) -> None:
    blocks = PackedBlocks(embedded, "train", 64, document_ids=True)
    sampler = StepBatchSampler(blocks, SampleOrder(len(blocks), 1), 4, accumulate=2, start_step=5, num_steps=6)
    blocks[0]  # the parent has mapped the file before it forks
    alone = list(batches(sampler, blocks))
    assert len(alone) == len(sampler) == 12
    assert all(map(same, alone, batches(sampler, blocks, workers)))
    assert all(batch["valid_tokens"] == 4 * 2 * 64 for batch in alone)


def test_a_run_continues_on_another_layout() -> None:
    whole = [ids for step in steps_of((6, 4, 1), 0, 10) for b in step for ids in b["sample_ids"].tolist()]
    parts = [steps_of((6, 4, 1), 0, 4), steps_of((3, 2, 4), 4, 6)]
    assert [i for part in parts for step in part for b in step for i in b["sample_ids"].tolist()] == whole


def test_a_run_continues_with_another_global_batch() -> None:
    """Four steps of 24 samples, then steps of 10: none twice, none left out."""
    sampler = StepBatchSampler(TASK, ORDER, 5, accumulate=2, start_step=4, num_steps=3, start_sample=4 * 24)
    keys = [key for batch in sampler for key in batch]
    assert [key.sample_id for key in keys] == list(range(96, 126))
    assert [key.dataset_index for key in keys] == ORDER(range(96, 126)).tolist()
    assert sorted({key.step for key in keys}) == [4, 5, 6]


def test_a_run_without_end() -> None:
    sampler = StepBatchSampler(TASK, ORDER, 5, start_step=10**12)
    first = next(iter(sampler))
    assert [key.sample_id for key in first] == list(range(5 * 10**12, 5 * 10**12 + 5))
    assert len(list(islice(sampler, 100))) == 100
    with pytest.raises(TypeError):
        len(sampler)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="order of 7"):
        StepBatchSampler(TASK, SampleOrder(7, 0), 1)
    for micro, accumulate, world, rank in [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 2, 2)]:
        with pytest.raises(ValueError, match="rank="):
            StepBatchSampler(TASK, ORDER, micro, accumulate, world, rank)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 11, 12, 13, 24, 25])
@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (4, 1), (4, 3), (3, 4), (8, 8)])
def test_evaluation_sees_each_sample_once(num_samples: int, batch_size: int, world: int) -> None:
    samples = TaskDataset("copy", "heldout", num_samples)
    ranks = [list(batches(EvaluationBatchSampler(samples, batch_size, world, r), samples)) for r in range(world)]
    sampler = EvaluationBatchSampler(samples, batch_size, world)
    assert {len(rank) for rank in ranks} == {len(sampler)}  # in step, as sharded strategies need
    seen = []
    for together in zip(*ranks, strict=True):
        for batch in together:
            assert 1 <= len(batch["input_ids"]) <= batch_size
            filler = batch["sample_ids"] < 0
            assert (batch["labels"][filler] == -100).all()
            seen += batch["sample_ids"][~filler].tolist()
        true = sum(int((batch["labels"] != -100).sum()) for batch in together)
        assert {int(batch["valid_tokens"]) for batch in together} == {true}
    assert seen == list(range(num_samples))  # never shuffled


def test_evaluation_scores_each_heldout_token_once(embedded: PreparedData) -> None:
    blocks = PackedBlocks(embedded, "heldout", 100, keep_last=True)
    labels = [batch["labels"] for r in range(3) for batch in batches(EvaluationBatchSampler(blocks, 8, 3, r), blocks)]
    scored = torch.cat([label[label != -100] for label in labels])
    stream = embedded["heldout"].read(0, embedded["heldout"].num_tokens)
    assert np.array_equal(np.sort(scored.numpy()), np.sort(stream[1:].numpy()))
