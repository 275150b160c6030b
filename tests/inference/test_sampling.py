"""The sampler against the exact distribution and against transformers' warpers."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.inference import Sampler, Sampling
from llmstack.inference.sampling import filtered_logits, sample_rows


def draw(logits: Tensor, sampling: Sampling, number: int) -> Tensor:
    """``number`` ids drawn one after another from ``logits`` [vocab]."""
    sampler = Sampler(sampling)
    return torch.tensor([sampler.sample(logits) for _ in range(number)])


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
    assert sample_rows(logits, [Sampler(Sampling()), Sampler(Sampling(seed=9))]) == [1, 2]
    assert [Sampler(Sampling(logit_bias={0: 0.5})).sample(row) for row in logits] == [1, 0]


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
    batch = [Sampler(row) for row in rows]
    together = [sample_rows(logits, batch) for logits in steps]
    for index, row in enumerate(rows):
        alone = Sampler(row)
        assert [ids[index] for ids in together] == [alone.sample(logits[index]) for logits in steps]


ORDERED = {
    "logit_bias": [{}, {3: 2.5, 7: -1.0, 150: 4.0, 199: -4.0}],
    "repetition_penalty": [1.0, 1.7, 0.6],
    "temperature": [0.8],
    "top_k": [None, 20],
    "top_p": [None, 0.9],
    "min_p": [None, 0.0, 0.05, 0.3, 1.0],
}


@pytest.mark.parametrize("options", itertools.product(*ORDERED.values()))
def test_bias_penalty_and_filters_together_equal_the_processors_of_transformers_in_their_order(
    options: tuple[object, ...],
):
    """The order that ``GenerationMixin._get_logits_processor`` gives them."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    named = dict(zip(ORDERED, options, strict=True))
    torch.manual_seed(0)
    prompt, logits = [5, 150, 3, 5, 90], 3 * torch.randn(6, 200, dtype=torch.float64)
    theirs = {name: value for name, value in named.items() if value and name != "logit_bias"}
    if named["logit_bias"]:
        theirs["sequence_bias"] = {(token,): bias for token, bias in named["logit_bias"].items()}
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, **tiny))
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **theirs})
    processors = model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    assert len(processors) == 1 + sum(
        [
            bool(named["logit_bias"]),
            named["repetition_penalty"] != 1,
            named["top_k"] is not None,
            named["top_p"] is not None,
            named["min_p"] is not None and named["min_p"] > 0,
        ]
    ), "none of theirs is left out"
    expected = processors(torch.tensor([prompt] * 6), logits.clone()).softmax(-1)
    for row, wanted in zip(logits, expected, strict=True):
        found = Sampler(Sampling(**named), prompt).probabilities(row)
        assert torch.equal(found > 0, wanted > 0)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


def test_a_penalty_counts_the_prompt_and_every_id_said_since():
    logits = torch.tensor([3.0, 2.9, -1.0, 2.8])
    sampler = Sampler(Sampling(repetition_penalty=2.0), [3])
    assert [sampler.sample(logits) for _ in range(4)] == [0, 1, 0, 0]
    assert sampler.adjusted(logits).tolist() == pytest.approx([1.5, 1.45, -1.0, 1.4])
    assert Sampler(Sampling(repetition_penalty=2.0), [2]).adjusted(logits)[2] == -2
    sampler.said(2)
    assert sampler.adjusted(logits)[2] == -2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_callers_logits_stay_as_they_are(dtype: torch.dtype, temperature: float):
    """Log-probabilities are taken from them afterwards."""
    logits = torch.tensor([3.0, 2.0, -1.0, 1.0], dtype=dtype)
    before = logits.clone()
    for options in ({"repetition_penalty": 2.0}, {"logit_bias": {0: 1.0}}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}):
        sampler = Sampler(Sampling(temperature, **options), [0, 1])
        sampler.sample(logits)
        sampler.probabilities(logits)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 5.0])
def test_an_id_with_a_bias_of_minus_infinity_is_never_drawn(temperature: float):
    logits = torch.tensor([9.0, 0.0, 0.0, 8.0])
    banned = Sampling(temperature, logit_bias={0: -math.inf, 3: -math.inf}, repetition_penalty=1.5)
    assert set(draw(logits, banned, 300).tolist()) <= {1, 2}
    shares = Sampler(banned, [0]).probabilities(logits)
    assert shares[0] == shares[3] == 0
    assert shares.sum() == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_every_id_is_banned_there_is_nothing_to_draw(temperature: float):
    banned = Sampling(temperature, logit_bias=dict.fromkeys(range(3), -math.inf))
    with pytest.raises(UserError):
        Sampler(banned).sample(torch.zeros(3))


def test_a_bias_decides_even_against_large_logits():
    logits = torch.tensor([100.0, 0.0, 0.0])
    assert draw(logits, Sampling(1.0, logit_bias={2: 250.0}), 20).unique().tolist() == [2]


def test_min_p_keeps_what_is_at_least_so_many_times_as_probable_as_the_most_probable():
    logits = torch.tensor([0.5, 0.25, 0.2, 0.05]).log()
    assert kept(logits, Sampling(1.0, min_p=0.45)).tolist() == [True, True, False, False]
    assert kept(logits, Sampling(1.0, min_p=1.0)).tolist() == [True, False, False, False]
    assert kept(logits, Sampling(1.0, min_p=0.0)).all()
    assert kept(logits, Sampling(2.0, min_p=0.45)).tolist() == [True, True, True, False], "after the temperature"


def test_what_follows_the_logits_alone_is_nothing_but_greedy():
    assert Sampling().follows_the_logits_alone
    assert Sampling(top_k=1, top_p=0.1, min_p=0.5).follows_the_logits_alone
    for other in (Sampling(1.0), Sampling(repetition_penalty=1.1), Sampling(logit_bias={1: 1.0})):
        assert not other.follows_the_logits_alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"logit_bias": {3: math.nan}}, "logit_bias of id 3 is nan"),
        ({"logit_bias": {3: math.inf}}, "logit_bias of id 3 is inf"),
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
        sample_rows(torch.tensor([[0.0, bad]]), [Sampler(Sampling())])
    with pytest.raises(UserError, match="NaN or infinite"):
        Sampler(Sampling(1.0)).sample(torch.tensor([0.0, bad]))
