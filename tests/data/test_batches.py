"""One global sequence of batches, whatever the ranks, micro-batches and workers; counts exact."""

import json
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
    prepare_source,
)
from llmstack.tokenizer import BosEosPolicy, train_tokenizer

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


EIGHT_SHARDS = [(ranks, workers) for ranks in (1, 2, 3) for workers in (0, 2, 4)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> PackedBlocks:
    """Blocks over eight shards, none of which ends where a block does."""
    folder = tmp_path_factory.mktemp("shards")
    files = [folder / "files" / f"{number}.jsonl" for number in range(8)]
    files[0].parent.mkdir()
    tokenizer = train_tokenizer((f"{i} words of text" for i in range(300)), 270)
    for number, file in enumerate(files):
        rows = (json.dumps({"text": f"file {number} row {row} " * (row % 5 + 1)}) + "\n" for row in range(60))
        file.write_text("".join(rows))
    policy, size = BosEosPolicy.default(tokenizer), max(file.stat().st_size for file in files)
    prepared = prepare_source(folder / "files", tokenizer, policy, out=folder / "out", unit_bytes=size)
    assert len(prepared.index["splits"]["train"]["shards"]) == 8
    return PackedBlocks(prepared, "train", 23, document_ids=True)


def sequence(blocks: PackedBlocks, ranks: int, workers: int, start: int, steps: int) -> list[dict[str, Any]]:
    """The samples of these steps of twelve, in the order of the run."""
    order = SampleOrder(len(blocks), 7)
    of_ranks = [
        list(batches(StepBatchSampler(blocks, order, 2, 6 // ranks, ranks, rank, start, steps), blocks, workers))
        for rank in range(ranks)
    ]
    names = ("sample_ids", "input_ids", "labels", "document_ids")
    in_order = [batch for together in zip(*of_ranks, strict=True) for batch in together]
    return [{name: batch[name][i] for name in names} for batch in in_order for i in range(2)]


@pytest.mark.parametrize(("ranks", "workers"), EIGHT_SHARDS)
def test_an_epoch_of_eight_shards_is_each_sample_once(shards: PackedBlocks, ranks: int, workers: int) -> None:
    """In one global order whatever the ranks and workers; the next epoch is another order."""
    steps = -(-2 * len(shards) // 12)
    found = sequence(shards, ranks, workers, 0, steps)
    assert [int(sample["sample_ids"]) for sample in found] == list(range(12 * steps))
    expected = SampleOrder(len(shards), 7)(np.arange(12 * steps))
    assert sorted(expected[: len(shards)]) == list(range(len(shards)))
    assert expected[: len(shards)].tolist() != expected[len(shards) : 2 * len(shards)].tolist()
    for sample, index in zip(found, expected, strict=True):
        assert all(torch.equal(sample[name], value) for name, value in shards[int(index)].items())


@pytest.mark.parametrize("layout", range(len(EIGHT_SHARDS)))
def test_three_segments_on_three_layouts_are_one_run(shards: PackedBlocks, layout: int) -> None:
    """5 + 5 + 5 steps, each on other ranks and workers, are the 15 of one process."""
    whole = sequence(shards, 1, 0, 0, 15)
    parts = [sequence(shards, *EIGHT_SHARDS[(layout + 4 * i) % 9], 5 * i, 5) for i in range(3)]
    assert all(map(same, whole, [sample for part in parts for sample in part]))


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
