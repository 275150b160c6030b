"""Speculative decoding: greedy ids are the same, drawn ones have the same distribution; no draft is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from llmstack.errors import UserError
from llmstack.inference import Generator, PromptLookup, Request, Sampler, Sampling
from llmstack.inference.speculation import Begun, Proposal, common_length, verified
from llmstack.model import Llama

BOS = 1
LONG, SHORT = list(range(3, 30)), [7, 5, 3]
REPEATING = [4, 5, 6, 7] * 5
GREEDY = [Request(LONG, 30), Request(SHORT, 41), Request(REPEATING, 9), Request([1], 2), Request([1], 1)]


def greedy_ids(generator: Generator, requests: list[Request] = GREEDY) -> list[list[int]]:
    return [completion.ids for completion in generator.generate(requests)]


def quantile(freedom: int) -> float:
    """The 99.9 % quantile of chi-square (Wilson and Hilferty, 1931: to 1 % from 3 degrees of freedom on)."""
    share = 2 / (9 * freedom)
    return freedom * (1 - share + 3.0902 * share**0.5) ** 3


def chi_square(found: Counter[Any], exact: dict[Any, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; what is expected fewer than 8 times is taken together."""
    number = sum(found.values())
    assert all(exact[outcome] > 0 for outcome in found), "what is impossible was found"
    large = {outcome: number * share for outcome, share in exact.items() if number * share >= 8}
    cells = [(found[outcome], expected) for outcome, expected in large.items()]
    rest = number - sum(large.values())
    if rest > 8:
        cells.append((number - sum(found[outcome] for outcome in large), rest))
    return sum((have - expected) ** 2 / expected for have, expected in cells), len(cells) - 1


# ---------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize(("tokens", "batch_size"), [(1, 2), (4, 1), (4, 3), (9, 2)])
@pytest.mark.parametrize("kind", ["model", "itself", "lookup"])
def test_greedy_ids_are_those_without_a_draft(
    random_model: Callable[..., Llama], kind: str, tokens: int, batch_size: int
) -> None:
    model = random_model(num_layers=2)
    drafts = {"model": random_model(num_layers=1), "itself": model, "lookup": PromptLookup(tokens)}
    expected = greedy_ids(Generator(model, 64))
    generator = Generator(model, 64, batch_size=batch_size, draft=drafts[kind], draft_tokens=tokens)
    assert greedy_ids(generator) == expected
    assert generator.acceptance.proposed > 0
    if kind == "itself":
        assert generator.acceptance.rate == 1
    if kind == "model":
        assert generator.acceptance.rate is not None
        assert generator.acceptance.rate < 1
    assert greedy_ids(generator) == expected, "it remembers nothing"


@pytest.mark.parametrize("options", [{"use_cache": False}, {"fold": False}, {"keep_prefixes": True}, {"chunk": 3}])
def test_every_other_choice_goes_with_a_draft(random_model: Callable[..., Llama], options: dict[str, Any]) -> None:
    model = random_model(num_layers=2, norm={"method": "bhyt_star", "mu_term": True})
    expected = greedy_ids(Generator(model, 64))
    for draft in (random_model(num_layers=1, positions="learned"), PromptLookup()):
        generator = Generator(model, 64, batch_size=2, draft=draft, **options)
        assert greedy_ids(generator) == expected
        assert greedy_ids(generator) == expected


def test_stop_ids_and_the_number_of_tokens_hold_within_a_proposal(random_model: Callable[..., Llama]) -> None:
    model = random_model(num_layers=2)
    generator = Generator(model, 64, draft=model, draft_tokens=7)
    ids = list(Generator(model, 64).stream(SHORT, 40))
    for place in (1, 2, 5, 11):
        stop = ids[place]
        completion = generator.generate([Request(SHORT, 40, stop_ids=[stop], logprobs=2)])[0]
        assert completion.ids == ids[: ids.index(stop) + 1]
        assert completion.finish == "stop"
        plain = Generator(model, 64).generate([Request(SHORT, 40, stop_ids=[stop], logprobs=2)])[0]
        assert completion.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert [[token for token, _ in known] for known in completion.alternatives] == [
            [token for token, _ in known] for known in plain.alternatives
        ]
    for number in range(1, 12):
        assert list(generator.stream(SHORT, number)) == ids[:number]


def test_all_positions_can_be_used(random_model: Callable[..., Llama]) -> None:
    model = random_model(max_position_embeddings=32)
    expected = list(Generator(model, 32).stream(SHORT, 29))
    for draft in (model, PromptLookup(6)):
        assert list(Generator(model, 32, draft=draft, draft_tokens=6).stream(SHORT, 29)) == expected


def test_a_penalty_counts_what_was_just_accepted(random_model: Callable[..., Llama]) -> None:
    """Greedy with a penalty depends on every id before, also those within one proposal."""
    model = random_model(num_layers=2)
    sampling = Sampling(repetition_penalty=2.0, logit_bias={3: 1.0})
    requests = [Request(LONG, 30, sampling), Request(SHORT, 30, sampling)]
    expected = greedy_ids(Generator(model, 64), requests)
    for draft in (model, random_model(num_layers=1), PromptLookup()):
        generator = Generator(model, 64, batch_size=2, draft=draft)
        assert greedy_ids(generator, requests) == expected
        if draft is model:
            assert generator.acceptance.rate == 1


@pytest.mark.parametrize("kind", ["itself", "random model", "lookup"])
def test_stories260k_tells_its_published_text_with_a_draft(
    stories: Llama, published_ids: list[int], random_model: Callable[..., Llama], kind: str
) -> None:
    small = random_model(vocab_size=stories.config.vocab_size, num_layers=1, max_position_embeddings=512)
    drafts = {"itself": stories, "random model": small, "lookup": PromptLookup()}
    generator = Generator(stories, 257, draft=drafts[kind], draft_tokens=6)
    assert list(generator.stream([BOS], 256)) == published_ids
    rate = generator.acceptance.rate
    assert rate is not None
    assert {"itself": rate == 1, "random model": rate < 0.1, "lookup": 0.1 < rate < 1}[kind]


# ------------------------------------------------------------------------------------------------------ distribution


FILTERS = {
    "nothing": Sampling(1.0),
    "all": Sampling(1.3, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.3, logit_bias={2: 0.7}),
    "cold and banned": Sampling(0.6, repetition_penalty=0.8, logit_bias={0: -torch.inf}),
}
NEW, PROMPT = 4, [1, 2, 3, 1, 2]


def small_model(random_model: Callable[..., Llama], **options: Any) -> Llama:
    sizes = {"vocab_size": 5, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    return random_model(**{**sizes, "intermediate_size": 16, "max_position_embeddings": 16, **options})


@torch.no_grad()
def exact(model: Llama, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of the prompt, by full passes and the processors of transformers."""
    from transformers.generation import logits_process

    processors = logits_process.LogitsProcessorList()
    if sampling.logit_bias:
        bias = {(token,): max(value, -1e9) for token, value in sampling.logit_bias.items()}
        processors.append(logits_process.SequenceBiasLogitsProcessor(bias))
    processors.append(logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(logits_process.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        processors.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        processors.append(logits_process.MinPLogitsWarper(sampling.min_p))
    found = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*PROMPT, *begun] for begun in found])
        shares = processors(ids, model(ids)[:, -1].double()).softmax(-1)
        found = {
            (*begun, token): before * float(shares[row, token])
            for row, (begun, before) in enumerate(found.items())
            for token in range(5)
        }
    assert sum(found.values()) == pytest.approx(1)
    return found


def drawn(generator: Generator, sampling: Sampling, number: int) -> Counter[tuple[int, ...]]:
    completions = generator.generate(Request(PROMPT, NEW, sampling).samples(number))
    return Counter(tuple(completion.ids) for completion in completions)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_continuations_are_as_frequent_as_the_model_alone_makes_them(
    random_model: Callable[..., Llama], kind: str, filters: str
) -> None:
    """Of its 4 tokens the first follows the prompt, the next two are proposed, the last may be the model's own."""
    model, sampling = small_model(random_model), FILTERS[filters]
    other = small_model(random_model, num_heads=4, num_kv_heads=4, initializer_range=0.5)
    draft = PromptLookup(2) if kind == "lookup" else other
    generator = Generator(model, 16, batch_size=50, draft=draft, draft_tokens=2)
    found = drawn(generator, sampling, 1500)
    expected = exact(model, sampling, NEW)
    statistic, freedom = chi_square(found, expected)
    assert freedom >= 5
    assert statistic < quantile(freedom)
    rate = generator.acceptance.rate
    assert rate is not None
    assert 0.05 < rate < 0.95, "proposals are accepted and refused"
    assert generator.acceptance.proposed > 1500


def test_the_statistic_would_show_a_draft_that_is_believed(random_model: Callable[..., Llama]) -> None:
    """The draft's own distribution is far from the model's: taking its proposals unseen would fail the test above."""
    sampling = FILTERS["nothing"]
    other = small_model(random_model, num_heads=4, num_kv_heads=4, initializer_range=0.5)
    found = drawn(Generator(other, 16, batch_size=50), sampling, 1000)
    statistic, freedom = chi_square(found, exact(small_model(random_model), sampling, NEW))
    assert statistic > 3 * quantile(freedom)
    statistic, freedom = chi_square(found, exact(other, sampling, NEW))
    assert statistic < quantile(freedom)


def test_a_request_draws_the_same_whatever_else_is_in_the_batch(random_model: Callable[..., Llama]) -> None:
    model = random_model(num_layers=2)
    requests = [
        Request(prompt, 12, Sampling(1.0, seed=seed)) for seed, prompt in enumerate([LONG, SHORT, REPEATING] * 2)
    ]
    for draft in (random_model(num_layers=1), PromptLookup()):
        alone = [Generator(model, 64, draft=draft).generate([request])[0].ids for request in requests]
        for batch_size in (1, 4):
            generator = Generator(model, 64, batch_size=batch_size, draft=draft)
            assert greedy_ids(generator, requests) == alone


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
def test_verified_ids_follow_the_model_and_are_kept_as_often_as_the_two_agree(
    sampling: Sampling, certain: bool
) -> None:
    """Fixed logits at three places; the two proposals are drawn from another distribution, or certain."""
    torch.manual_seed(1)
    logits, others = torch.randn(3, 5), 1.5 * torch.randn(2, 5)
    number, lone = 4000, Sampling(sampling.temperature, logit_bias=sampling.logit_bias, top_k=4)
    own = [Sampler(lone).probabilities(row) for row in logits]
    drafts = [Sampler(lone).probabilities(row) for row in others]
    generator = torch.Generator().manual_seed(7)
    proposed = torch.stack([torch.multinomial(q, number, replacement=True, generator=generator) for q in drafts], 1)
    if certain:
        proposed[:] = torch.tensor([own[0].argmax(), own[1].argsort()[-2]])
        drafts = [torch.eye(5, dtype=torch.float64)[place] for place in proposed[0]]
    outcomes = []
    for seed, ids in enumerate(proposed.tolist()):
        proposal = Proposal(ids, None if certain else drafts)
        sampler = Sampler(Sampling(sampling.temperature, logit_bias=sampling.logit_bias, top_k=4, seed=seed))
        outcomes.append(list(verified(sampler, logits, proposal)))
    for place in range(3):
        reached = [outcome[place][0] for outcome in outcomes if len(outcome) > place]
        expected = {token: float(share) for token, share in enumerate(own[place])}
        statistic, freedom = chi_square(Counter(reached), expected)
        assert statistic < quantile(freedom)
    for place in range(2):
        trials = [outcome[place][1] for outcome in outcomes if len(outcome) > place]
        share = float(torch.minimum(own[place], drafts[place]).sum())
        assert abs(sum(trials) / len(trials) - share) < 3.3 * (share * (1 - share) / len(trials)) ** 0.5 + 1e-9
    assert all(kept for outcome in outcomes for _, kept in outcome[:-1])
    assert not any(outcome[-1][1] for outcome in outcomes)


def test_a_refused_proposal_is_never_what_follows() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    for seed in range(50):
        outcome = list(verified(Sampler(Sampling(1.0, seed=seed)), logits, Proposal([2], None)))
        assert len(outcome) == 1
        assert outcome[0][0] in (0, 1)
        outcome = list(verified(Sampler(Sampling(1.0, seed=seed)), logits, Proposal([0], None)))
        assert outcome[0] in ((0, True), (1, False))


def test_damaged_logits_are_refused_at_any_place_that_is_reached() -> None:
    whole = torch.zeros(3)
    for place in range(3):
        rows = [whole] * 3
        rows[place] = torch.tensor([0.0, torch.nan, 0.0])
        for sampling in (Sampling(), Sampling(1.0)):
            one = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
            proposal = Proposal([0, 0], [one / 3, one / 3])
            with pytest.raises(UserError, match="NaN or infinite"):
                list(verified(Sampler(sampling), torch.stack(rows), proposal))


# ------------------------------------------------------------------------------------------------------------ drafts


@pytest.mark.parametrize(
    ("ids", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([9, 2, 3, 5, 8, 2, 3, 6, 2, 3], 9, [6, 2, 3]),
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, [7]),
        ([5, 5, 5], 9, [5]),
        ([1, 2, 3], 9, []),
        ([1], 9, []),
    ],
)
def test_prompt_lookup_proposes_what_followed_the_longest_and_then_the_latest(
    ids: list[int], limit: int, expected: list[int]
) -> None:
    found = PromptLookup(4, 3).propose({6: Begun(ids, Sampling(), limit)})
    assert found == ({6: Proposal(expected, None)} if expected else {})


def test_the_common_beginning_of_two_texts() -> None:
    for first, second, length in (([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 4, 3], 1), ([2], [3], 0)):
        assert common_length(first, second) == common_length(second, first) == length


def test_an_id_of_the_prompt_that_is_never_drawn_can_be_looked_up(random_model: Callable[..., Llama]) -> None:
    """Padding of the embedding, or what only a user may say."""
    model = random_model(num_layers=2)
    prompt = [3, 50, 96, 3, 50, 96, 3]
    for sampling in (Sampling(), Sampling(logit_bias={3: 9.0}), Sampling(1.0, seed=1, logit_bias={3: 9.0})):
        ids = list(Generator(model, 64, vocab_size=10, draft=PromptLookup()).stream(prompt, 20, sampling))
        assert len(ids) == 20
        assert max(ids) < 10
        if sampling.temperature == 0:
            assert ids == list(Generator(model, 64, vocab_size=10).stream(prompt, 20, sampling))
    penalised = Sampling(1.0, repetition_penalty=1.2)
    assert len(list(Generator(model, 64, vocab_size=10, draft=model).stream(prompt, 20, penalised))) == 20


def test_drafts_that_do_not_fit_are_refused(random_model: Callable[..., Llama]) -> None:
    model = random_model(num_layers=2)
    with pytest.raises(UserError, match="the draft model has 98 ids, the model 97"):
        Generator(model, 64, draft=random_model(vocab_size=98))
    with pytest.raises(UserError, match="the draft model has 32 positions, fewer than the 64 asked for"):
        Generator(model, 64, draft=random_model(max_position_embeddings=32))
    with pytest.raises(UserError, match="draft_tokens is 0"):
        Generator(model, 64, draft=model, draft_tokens=0)


@pytest.mark.parametrize("damaged", ["model", "draft"])
def test_after_damaged_weights_were_mended_neither_model_nor_draft_remembers_them(
    random_model: Callable[..., Llama], damaged: str
) -> None:
    model = random_model(num_layers=2)
    requests = [*GREEDY, Request(LONG, 20, Sampling(1.0, seed=4))]
    generator = Generator(model, 64, batch_size=2, keep_prefixes=True, draft=random_model(num_layers=2))
    expected = greedy_ids(generator, requests)
    runner = generator.runner if damaged == "model" else generator.draft._runner
    weight = runner.model.blocks[0].attention.v_proj.weight
    whole = weight.clone()
    run = generator.run(requests)
    for _ in range(10):
        next(run)
    weight.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN or infinite"):
        list(run)
    weight.copy_(whole)
    assert greedy_ids(generator, requests) == expected


@pytest.mark.full
@pytest.mark.parametrize(("kind", "graphs"), [("lookup", 2), ("model", 3)])
def test_compiled_one_graph_decodes_one_verifies_and_one_drafts_whatever_comes(
    random_model: Callable[..., Llama], kind: str, graphs: int
) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = random_model(num_layers=1)
    draft = PromptLookup(3) if kind == "lookup" else random_model(num_layers=1, num_kv_heads=4)
    generator = Generator(model, 64, batch_size=2, compile=True, draft=draft, draft_tokens=3)
    generator.warm_up()
    assert counters["stats"]["unique_graphs"] == graphs
    for length in range(1, 11):
        request = Request(REPEATING[:length], 5 + length)
        assert greedy_ids(generator, [request]) == greedy_ids(Generator(model, 64), [request])
    assert greedy_ids(generator) == greedy_ids(Generator(model, 64))
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_probabilities_are_what_is_drawn_from() -> None:
    """Of ``Sampler.probabilities``: each id is drawn as often as it says, greedy always the same one."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0])
    for sampling in FILTERS.values():
        shares = Sampler(sampling, [2]).probabilities(logits)
        assert shares.sum().item() == pytest.approx(1)
        found: Counter[int] = Counter()
        for seed in range(1500):
            own = Sampling(
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                seed,
                logit_bias=sampling.logit_bias,
                repetition_penalty=sampling.repetition_penalty,
                min_p=sampling.min_p,
            )
            found[Sampler(own, [2]).sample(logits)] += 1
        statistic, freedom = chi_square(found, dict(enumerate(shares.tolist())))
        assert statistic < quantile(freedom)
    assert Sampler(Sampling()).probabilities(logits).tolist() == [0, 0, 1, 0, 0]
