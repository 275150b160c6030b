"""The sampler against the exact distribution and against transformers' warpers."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.inference import Sampler, Sampling
from llmstack.inference.sampling import filtered_logits


def draw(logits: Tensor, sampling: Sampling, number: int) -> Tensor:
    """``number`` ids drawn one after another from ``logits`` [vocab]."""
    sampler = Sampler([sampling])
    return torch.cat([sampler.sample(logits[None]) for _ in range(number)])


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    return filtered_logits(logits, sampling).isfinite()


def test_frequencies_follow_the_softmax_at_the_temperature():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -torch.inf, 0.25, -0.5, 1.0])
    number, temperature = 4_000, 0.7
    counts = torch.bincount(draw(logits, Sampling(temperature, seed=5), number), minlength=len(logits))
    possible = logits.isfinite()
    expected = number * torch.softmax(logits.double() / temperature, 0)[possible]
    assert counts[~possible].sum() == 0
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3, "above the 99.9 % quantile for 7 degrees of freedom"


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, 2.5, 2.4]])
    assert Sampler([Sampling(), Sampling(seed=9)]).sample(logits).tolist() == [1, 2]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.tensor([1.0, 5.0, 4.999])
    assert draw(logits, Sampling(1e-300), 20).unique().tolist() == [1]


@pytest.mark.parametrize(
    ("top_k", "top_p"), itertools.product([None, 1, 5, 50, 200, 1000], [None, 0.01, 0.3, 0.9, 0.999, 1.0])
)
def test_kept_ids_and_their_probabilities_equal_those_of_transformers(top_k: int | None, top_p: float | None):
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits = 3 * torch.randn(8, 200, dtype=torch.float64)
    temperature = 0.8
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p is not None:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = filtered_logits(logits, Sampling(temperature, top_k, top_p))
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-12, atol=0)


def test_equal_logits_at_the_edge_are_treated_as_by_transformers():
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert kept(logits, Sampling(1.0, top_k=2)).tolist() == [[True] * 4] * 2
    assert torch.equal(kept(logits, Sampling(1.0, top_k=2)), TopKLogitsWarper(2)(None, logits).isfinite())
    assert kept(logits[1], Sampling(1.0, top_p=0.5)).tolist() == [False, False, True, True]
    assert torch.equal(kept(logits, Sampling(1.0, top_p=0.5)), TopPLogitsWarper(0.5)(None, logits).isfinite())


def test_top_p_of_one_and_top_k_of_the_vocabulary_leave_nothing_out():
    # The last id underflows in any cumulative sum, yet is possible.
    logits = torch.tensor([0.0, -1.0, -700.0])
    for sampling in (Sampling(1.0, top_p=1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_k=10, top_p=1.0)):
        assert torch.equal(filtered_logits(logits, sampling), logits.double())


def test_a_seed_fixes_the_draws_and_another_changes_them():
    logits = torch.zeros(1000)
    first, again, other = (draw(logits, Sampling(1.0, seed=seed), 50).tolist() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_row_draws_the_same_ids_alone_and_in_any_batch():
    torch.manual_seed(0)
    steps = torch.randn(20, 3, 50)
    rows = [Sampling(1.0, seed=1), Sampling(0.5, top_k=5, seed=2), Sampling(1.3, top_p=0.8, seed=3)]
    batch = Sampler(rows)
    together = torch.stack([batch.sample(logits) for logits in steps])
    for index, row in enumerate(rows):
        alone = Sampler([row])
        assert together[:, index].tolist() == [alone.sample(logits[index, None]).item() for logits in steps]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], message: str):
    with pytest.raises(UserError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error(bad: float):
    with pytest.raises(UserError, match="NaN or infinite"):
        Sampler([Sampling()]).sample(torch.tensor([[0.0, bad]]))
