"""Generated samples have the answer they claim, depend on (seed, i) alone, and keep their splits apart."""

from typing import Literal

import numpy as np
import pytest
import torch

from llmstack.data import TaskDataset
from llmstack.data.tasks import BOS_ID, EOS_ID, FIRST_SYMBOL_ID, SEP_ID, are_heldout
from llmstack.errors import UserError


def parse(sample: dict[str, torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Prompt, answer and scored labels, read off the sequence itself."""
    tokens = [*sample["input_ids"].tolist(), EOS_ID]
    assert tokens[0] == BOS_ID
    sep = tokens.index(SEP_ID)
    end = tokens.index(EOS_ID)
    assert set(tokens[end:]) == {EOS_ID}
    labels = sample["labels"]
    positions = torch.nonzero(labels != -100).flatten().tolist()
    assert positions == list(range(sep, end))  # from SEP, which predicts the first symbol, to the last
    assert labels[sep:end].tolist() == tokens[sep + 1 : end + 1]
    return tokens[1:sep], tokens[sep + 1 : end], labels[sep:end].tolist()


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("task", ["copy", "sort"])
def test_answers_are_right(task: Literal["copy", "sort"], split: Literal["train", "heldout"]) -> None:
    data = TaskDataset(task, split, num_samples=300, seed=1)
    lengths = []
    for i in range(len(data)):
        sample = data[i]
        assert sample["input_ids"].shape == sample["labels"].shape == (data.block_size,)
        prompt, answer, scored = parse(sample)
        assert answer == (sorted(prompt) if task == "sort" else prompt)
        assert scored == [*answer, EOS_ID]
        assert FIRST_SYMBOL_ID <= min(prompt) <= max(prompt) < data.vocab_size
        lengths.append(len(prompt))
    assert set(lengths) == set(range(4, 17))
    assert data.valid_tokens(np.arange(300)).tolist() == [length + 1 for length in lengths]


def test_sample_is_a_function_of_seed_and_number() -> None:
    small, large = (TaskDataset("copy", "train", n, seed=5) for n in (10, 10**12))
    for i in (9, 3, 0):
        assert torch.equal(small[i]["input_ids"], large[i]["input_ids"])
    assert not torch.equal(small[0]["input_ids"], TaskDataset("copy", "train", 10, seed=6)[0]["input_ids"])
    assert parse(large[10**12 - 1])
    with pytest.raises(IndexError):
        small[10]


def test_no_heldout_prompt_is_trained_on() -> None:
    """A space of only 1,000 prompts, drawn from thousands of times under several seeds."""
    prompts: dict[str, set[tuple[int, ...]]] = {"train": set(), "heldout": set()}
    for split, found in prompts.items():
        for seed in (0, 1):
            data = TaskDataset("copy", split, 1000, seed, num_symbols=10, min_length=3, max_length=3)  # type: ignore[arg-type]
            found.update(tuple(parse(data[i])[0]) for i in range(len(data)))
    assert not prompts["train"] & prompts["heldout"]
    assert len(prompts["train"] | prompts["heldout"]) > 850  # together nearly all
    assert 60 < len(prompts["heldout"]) < 140  # one in ten


def test_hash_rule_holds_out_one_in_ten() -> None:
    generator = np.random.default_rng(0)
    assert 400 < are_heldout(generator.integers(3, 29, (5000, 8))).sum() < 600


def test_symbols_are_uniform() -> None:
    data = TaskDataset("copy", "train", num_samples=2000, num_symbols=10)
    counts = np.bincount(np.concatenate([data.prompt(i) for i in range(2000)]) - FIRST_SYMBOL_ID, minlength=10)
    expected = counts.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 35  # chi-square with 9 degrees: p < 1e-4


def test_wrong_arguments() -> None:
    with pytest.raises(UserError, match="unknown task 'reverse': choose copy or sort"):
        TaskDataset("reverse", "train", 10)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="only 4 prompts of length 2"):
        TaskDataset("copy", "train", 10, num_symbols=2, min_length=2)
    with pytest.raises(UserError, match="min_length <= max_length"):
        TaskDataset("copy", "train", 10, min_length=9, max_length=8)
