"""Batches: each request gets what it gets alone, whatever is under way, was before, or begins like it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from llmstack.errors import UserError
from llmstack.inference import Completion, Generator, PromptLookup, Request, Sampling
from llmstack.model import Llama

BOS = 1


def text(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


REQUESTS = [
    Request(text(9), 12),
    Request(text(1, 1), 20, Sampling(1.0, seed=1)),
    Request(text(30, 2), 5, Sampling(0.7, top_k=20, top_p=0.9, seed=2)),
    Request(text(17, 3), 1),
    Request(text(3, 4), 25, Sampling(1.2, seed=3, min_p=0.05, repetition_penalty=1.3, logit_bias={5: 2.0, 7: -3.0})),
    Request(text(12, 5), 18, Sampling(repetition_penalty=1.5)),
    Request(text(2, 6), 9, Sampling(1.0, seed=1)),
    Request(text(5, 7), 30),
]
OTHERS = [Request(text(8, seed), 11, Sampling(1.0, seed=seed)) for seed in range(20, 25)]


def lone(model: Llama, requests: Iterable[Request], **options: Any) -> list[Completion]:
    """Each by a generator of its own."""
    return [Generator(model, 64, **options).generate([request])[0] for request in requests]


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


def read_tokens(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of every piece of a prompt that the model reads from now on."""
    seen: list[int] = []
    extend = generator.runner.extend

    def counted(piece: Tensor, start: int, rows: Tensor) -> Tensor:
        seen.append(piece.numel())
        return extend(piece, start, rows)

    monkeypatch.setattr(generator.runner, "extend", counted)
    return seen


@pytest.fixture
def stopping(random_model: Callable[..., Llama]) -> list[Request]:
    """Half of them with a stop id that ends them early."""
    requests = list(REQUESTS)
    for index, completion in enumerate(lone(random_model(num_layers=2), requests)):
        if index % 2 == 0:
            requests[index] = replace(requests[index], stop_ids={completion.ids[len(completion.ids) // 2]})
    return requests


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 4), (2, 512), (3, 4), (3, 512), (4, 7), (5, 512)])
def test_each_request_of_a_ragged_batch_gets_what_it_gets_alone(
    random_model: Callable[..., Llama], stopping: list[Request], batch_size: int, chunk: int
) -> None:
    model = random_model(num_layers=2)
    alone = lone(model, stopping)
    together = Generator(model, 64, batch_size=batch_size, chunk=chunk).generate(stopping)
    assert ids(together) == ids(alone)
    assert [completion.finish for completion in together] == ["stop", "length"] * 4
    assert any(len(set(found)) > 8 for found in ids(together))


@pytest.mark.parametrize(
    "overrides",
    [
        {"norm": {"method": "bhyt"}, "positions": "learned"},
        {"norm": {"method": "bhyt_star", "mu_term": True}},
        {"norm": {"method": "layernorm"}, "positions": "sinusoidal", "num_kv_heads": 4},
        {"norm": {"method": "peri_ln"}, "positions": "none", "num_kv_heads": 1},
    ],
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_other_architectures_batch_alike(
    random_model: Callable[..., Llama], overrides: dict[str, Any], use_cache: bool
) -> None:
    model = random_model(num_layers=2, **overrides)
    together = Generator(model, 64, batch_size=3, use_cache=use_cache).generate(REQUESTS)
    assert ids(together) == ids(lone(model, REQUESTS))


def test_tokens_come_in_the_order_of_each_request_and_rows_are_refilled_at_once(
    random_model: Callable[..., Llama],
) -> None:
    generator = Generator(random_model(num_layers=2), 64, batch_size=3)
    tokens = list(generator.run(REQUESTS))
    alone = lone(random_model(num_layers=2), REQUESTS)
    for number, completion in enumerate(alone):
        own = [token for token in tokens if token.request == number]
        assert [token.id for token in own] == completion.ids
        assert [token.finish for token in own] == [None] * (len(own) - 1) + ["length"]
    begun = list(dict.fromkeys(token.request for token in tokens))
    assert begun == list(range(len(REQUESTS)))
    ended = 0
    for token in tokens:
        assert token.request < ended + 3, "no more than three are under way"
        ended += token.finish is not None
    first_of_fourth = next(place for place, token in enumerate(tokens) if token.request == 3)
    assert any(token.request == 0 for token in tokens[first_of_fourth:]), "it did not wait for the first three"


def test_requests_as_the_server_makes_them_one_joins_while_others_go_on_and_one_is_given_up(
    random_model: Callable[..., Llama],
) -> None:
    model = random_model(num_layers=2)
    alone = ids(lone(model, REQUESTS))
    generator = Generator(model, 64, batch_size=2)
    found: dict[int, list[int]] = {number: [] for number in range(len(REQUESTS))}

    def take(tokens: Iterable[Any]) -> None:
        for token in tokens:
            found[token.request].append(token.id)

    take(generator.admit([(0, REQUESTS[0])]))
    take(generator.step())
    take(generator.admit([(4, REQUESTS[4])]))
    assert generator.free == 0
    take(generator.step())
    generator.release(0)
    assert (generator.free, generator.under_way) == (1, True)
    take(generator.admit([(7, REQUESTS[7])]))
    while generator.under_way:
        take(generator.step())
    assert found[0] == alone[0][:3]
    assert (found[4], found[7]) == (alone[4], alone[7])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_logprobs_are_those_of_the_model_itself_and_alternatives_its_most_probable_ids(
    random_model: Callable[..., Llama], batch_size: int
) -> None:
    """Whatever bias, penalty and temperature make of them."""
    model = random_model(num_layers=2)
    asked = [replace(request, logprobs=index % 4) for index, request in enumerate(REQUESTS)]
    for request, completion in zip(asked, Generator(model, 64, batch_size=batch_size).generate(asked), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_ids, *completion.ids]]))[0]
        known = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        own = known[range(len(completion.ids)), completion.ids]
        torch.testing.assert_close(torch.tensor(completion.logprobs), own, rtol=0, atol=1e-4)
        assert len(completion.alternatives) == len(completion.ids)
        best = known.topk(request.logprobs or 0)
        for place, alternatives in enumerate(completion.alternatives):
            assert [token for token, _ in alternatives] == best.indices[place].tolist()
            values = torch.tensor([value for _, value in alternatives])
            torch.testing.assert_close(values, best.values[place], rtol=0, atol=1e-4)


def test_logprobs_are_of_the_ids_that_can_be_drawn_and_none_are_given_unasked(
    random_model: Callable[..., Llama],
) -> None:
    model = random_model(num_layers=2)
    generator = Generator(model, 64, vocab_size=3)
    completion = generator.generate([Request([1, 2], 5, logprobs=50)])[0]
    for alternatives in completion.alternatives:
        assert sum(torch.tensor([value for _, value in alternatives]).exp()) == pytest.approx(1)
    assert [len(alternatives) for alternatives in completion.alternatives] == [3] * 5
    unasked = generator.generate([Request([1, 2], 5)])[0]
    assert (unasked.logprobs, unasked.alternatives) == ([], [])
    with pytest.raises(UserError, match="logprobs is -1"):
        Request([1], 5, logprobs=-1)


@pytest.mark.parametrize("option", [{"repetition_penalty": 1.5}, {"logit_bias": {96: 5.0}}])
def test_ids_of_a_prompt_or_bias_beyond_those_that_are_drawn_do_no_harm(
    random_model: Callable[..., Llama], option: dict[str, Any]
) -> None:
    """The model has 97 ids, of which 10 are drawn; as in transformers the others are not penalised."""
    generator = Generator(random_model(num_layers=2), 64, vocab_size=10)
    for temperature in (0.0, 1.0):
        completion = generator.generate([Request([50, 3, 96], 20, Sampling(temperature, **option))])[0]
        assert len(completion.ids) == 20
        assert max(completion.ids) < 10


@pytest.mark.parametrize("options", [{}, {"keep_prefixes": True}, {"draft": PromptLookup()}, {"use_cache": False}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_generator_remembers_nothing_that_changes_a_token(
    random_model: Callable[..., Llama], options: dict[str, Any], batch_size: int
) -> None:
    model = random_model(num_layers=2)
    generator = Generator(model, 64, batch_size=batch_size, **options)
    first, second = ids(lone(model, REQUESTS, **options)), ids(lone(model, OTHERS, **options))
    assert ids(generator.generate(REQUESTS)) == first
    assert ids(generator.generate(OTHERS)) == second
    assert ids(generator.generate(REQUESTS)) == first


def test_a_run_that_is_broken_off_leaves_nothing(random_model: Callable[..., Llama]) -> None:
    model = random_model(num_layers=2)
    expected = ids(lone(model, REQUESTS))
    for keep_prefixes in (False, True):
        generator = Generator(model, 64, batch_size=3, keep_prefixes=keep_prefixes)
        for number in (0, 12):
            run = generator.run(REQUESTS)
            for _ in range(number):
                next(run)
            assert ids(generator.generate(REQUESTS)) == expected


@pytest.mark.full
def test_a_compiled_batch_is_one_graph_for_all_lengths_and_remembers_nothing(
    random_model: Callable[..., Llama],
) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = random_model(num_layers=1)
    generator = Generator(model, 64, batch_size=3, compile=True, keep_prefixes=True)
    expected = ids(lone(model, REQUESTS)), ids(lone(model, OTHERS))
    assert ids(generator.generate(REQUESTS)) == expected[0]
    assert ids(generator.generate(OTHERS)) == expected[1]
    assert ids(generator.generate(REQUESTS)) == expected[0]
    for length in range(1, 11):
        generator.generate([Request(text(length, length), 4 + length)])
    assert counters["stats"]["unique_graphs"] == 1


def test_samples_of_one_prompt_are_the_lone_runs_of_their_seeds(random_model: Callable[..., Llama]) -> None:
    model = random_model(num_layers=2)
    request = Request(text(24), 10, Sampling(1.0, top_k=30, seed=7))
    samples = request.samples(5)
    assert [sample.sampling.seed for sample in samples] == [7, 8, 9, 10, 11]
    assert samples[0] == request
    alone = [Request(text(24), 10, Sampling(1.0, top_k=30, seed=seed)) for seed in range(7, 12)]
    for options in ({}, {"keep_prefixes": True}):
        together = ids(Generator(model, 64, batch_size=3, **options).generate(samples))
        assert together == ids(lone(model, alone))
        assert len({tuple(found) for found in together}) == 5


def test_a_prompt_that_goes_on_from_the_last_answer_is_read_from_there(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_layers=2)
    generator = Generator(model, 128, keep_prefixes=True)
    seen = read_tokens(generator, monkeypatch)
    talk = text(20)
    for turn in range(4):
        seen.clear()
        answer = generator.generate([Request(talk, 6)])[0].ids
        assert answer == list(Generator(model, 128).stream(talk, 6))
        # The last token of an answer is found, not read.
        assert sum(seen) == (20 if turn == 0 else 1 + 5)
        talk = talk + answer + text(5, turn + 1)


def test_of_a_prompt_that_is_known_only_the_last_token_is_read(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_layers=2)
    for keep_prefixes, expected in ((True, 1), (False, 20)):
        generator = Generator(model, 64, keep_prefixes=keep_prefixes)
        first = list(generator.stream(text(20), 8))
        seen = read_tokens(generator, monkeypatch)
        assert list(generator.stream(text(20), 8)) == first
        assert sum(seen) == expected
        seen.clear()
        assert list(generator.stream(text(20)[:9], 8)) == list(Generator(model, 64).stream(text(20)[:9], 8))
        assert sum(seen) == (1 if keep_prefixes else 9)


def test_what_any_row_has_read_serves_every_row(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_layers=2)
    one, other = text(20, 1), text(22, 2)
    generator = Generator(model, 64, batch_size=3, keep_prefixes=True)
    generator.generate([Request(one, 3), Request(other, 3)])
    seen = read_tokens(generator, monkeypatch)

    def run(*prompts: list[int]) -> int:
        seen.clear()
        requests = [Request(prompt, 4) for prompt in prompts]
        assert ids(generator.generate(requests)) == ids(lone(model, requests))
        return sum(seen)

    assert run([*other, 3], [*one, 4]) == 2, "in any order, each from its row"
    assert run([*one, 5], [*one, 6], [*one, 7]) == 3, "one row serves three"
    assert run([*one[:10], 5, 5], [*one, 8, 9]) == 4, "a part of it serves too"


def test_a_request_that_no_row_knows_takes_no_row_that_another_one_needs(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_layers=2)
    known = text(30, 1)
    generator = Generator(model, 64, batch_size=2, keep_prefixes=True)
    generator.generate([Request(known, 3)])
    seen = read_tokens(generator, monkeypatch)
    requests = [Request(text(4, 9), 4), Request([*known, 3, 4], 4)]
    assert ids(generator.generate(requests)) == ids(lone(model, requests))
    assert sum(seen) == 4 + 2


def test_while_one_request_goes_on_another_may_begin_with_what_it_has_read(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(num_layers=2)
    generator = Generator(model, 64, batch_size=2, keep_prefixes=True)
    seen = read_tokens(generator, monkeypatch)
    requests = [Request(text(20), 30), Request(text(3, 1), 2), Request([*text(20), 9], 6)]
    assert ids(generator.generate(requests)) == ids(lone(model, requests))
    assert sum(seen) == 2 * 20 + 1, "the first two are padded to one length"


@pytest.mark.parametrize(("common", "expected"), [(16, 16 + 3 * 5), (40, 40 + 3 * 5), (15, 3 * 20)])
@pytest.mark.parametrize("keep_prefixes", [False, True])
def test_a_long_common_beginning_of_one_batch_is_read_once(
    random_model: Callable[..., Llama],
    monkeypatch: pytest.MonkeyPatch,
    common: int,
    expected: int,
    keep_prefixes: bool,
) -> None:
    model = random_model(num_layers=2)
    tails = [[10 + seed, *text(4, seed)] for seed in range(3)]
    requests = [Request(text(common) + tail, 6, Sampling(1.0, seed=3)) for tail in tails]
    generator = Generator(model, 64, batch_size=3, keep_prefixes=keep_prefixes)
    seen = read_tokens(generator, monkeypatch)
    assert ids(generator.generate(requests)) == ids(lone(model, requests))
    assert sum(seen) == expected


def test_equal_prompts_are_read_once_but_for_their_last_token(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(random_model(num_layers=2), 64, batch_size=4)
    seen = read_tokens(generator, monkeypatch)
    generator.generate(Request(text(30), 5, Sampling(1.0)).samples(4))
    assert sum(seen) == 29 + 4


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"batch_size": 3, "keep_prefixes": True, "chunk": 7},
        pytest.param({"batch_size": 2, "fold": False}, marks=pytest.mark.full),
    ],
)
def test_copies_of_stories260k_all_tell_the_published_text(
    stories: Llama, published_ids: list[int], options: dict[str, Any]
) -> None:
    generator = Generator(stories, 257, **options)
    requests = [Request([BOS], 256), Request([BOS, *published_ids[:100]], 100), Request([BOS], 256)]
    expected = [published_ids, published_ids[100:200], published_ids]
    assert ids(generator.generate(requests)) == expected
    again = [Request([BOS, *published_ids[:number]], 20) for number in (60, 200, 100)]
    assert ids(generator.generate(again)) == [published_ids[number : number + 20] for number in (60, 200, 100)]


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_stories260k_goes_on_from_a_prompt_read_by_pieces(stories: Llama, published_ids: list[int], chunk: int) -> None:
    generator = Generator(stories, 257, chunk=chunk, keep_prefixes=True)
    for length in (180, 40, 181):
        answer = list(generator.stream([BOS, *published_ids[:length]], 30))
        assert answer == published_ids[length : length + 30]


@pytest.mark.parametrize("keep_prefixes", [False, True])
@pytest.mark.parametrize("damaged", ["attention.v_proj", "mlp.up_proj"])
def test_after_damaged_weights_were_mended_nothing_of_them_is_left(
    random_model: Callable[..., Llama], keep_prefixes: bool, damaged: str
) -> None:
    model = random_model(num_layers=2)
    expected = ids(lone(model, REQUESTS))
    generator = Generator(model, 64, batch_size=3, keep_prefixes=keep_prefixes)
    weight = generator.runner.model.blocks[1].get_submodule(damaged).weight
    whole = weight.clone()
    run = generator.run(REQUESTS)
    for _ in range(10):
        next(run)
    weight.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN or infinite"):
        list(run)
    assert not generator.under_way
    with pytest.raises(UserError, match="NaN or infinite"):
        generator.generate(REQUESTS)
    weight.copy_(whole)
    assert ids(generator.generate(REQUESTS)) == expected


def test_no_request_is_begun_when_one_of_them_is_impossible(
    random_model: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(random_model(num_layers=2), 40, batch_size=2)
    seen = read_tokens(generator, monkeypatch)
    good, open_run = Request([3, 4], 5), generator.run([Request([3, 4], 5)])
    first = next(open_run)
    seen.clear()
    for bad, message in (
        (Request(text(36), 5), "36 prompt tokens \\+ 5 new ones are 41"),
        (Request([], 5), "empty"),
        (Request([97], 5), "id 97"),
        (Request([1], 5, Sampling(logit_bias={97: 1.0})), "id 97"),
        (Request([1], 5, stop_strings=["a"]), "stop strings need a tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            generator.run([good, bad])
        with pytest.raises(UserError, match=message):
            generator.generate([bad, good])
    assert seen == []
    assert [first.id, *(token.id for token in open_run)] == list(
        Generator(random_model(num_layers=2), 40).stream([3, 4], 5)
    )


@pytest.mark.parametrize("option", ["batch_size", "chunk", "draft_tokens"])
def test_sizes_below_one_are_refused(random_model: Callable[..., Llama], option: str) -> None:
    with pytest.raises(UserError, match=f"{option} is 0"):
        Generator(random_model(num_layers=2), 40, **{option: 0})


def test_nothing_asked_is_nothing_answered(random_model: Callable[..., Llama]) -> None:
    assert Generator(random_model(num_layers=2), 40).generate([]) == []


def test_norms_that_are_half_removed_run_as_they_are_and_the_log_says_so(
    random_model: Callable[..., Llama], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, not an error: a checkpoint from the middle of a training can be looked at."""
    model = random_model(norm={"method": "tapernorm_all", "taper_start": 0.1, "taper_end": 0.4})
    model.config.norm_method.after_step(model, 25, 100)
    with caplog.at_level(logging.WARNING):
        generator = Generator(model, 64, batch_size=3)
    assert "it runs as it is" in caplog.text
    assert ids(generator.generate(REQUESTS)) == ids(lone(model, REQUESTS, use_cache=False))


def test_a_row_may_end_while_others_still_read(random_model: Callable[..., Llama]) -> None:
    """Prompts of one batch that start at different places of what is held, and one that ends with its first token."""
    model = random_model()
    generator = Generator(model, 64, batch_size=2, keep_prefixes=True)
    shared = list(range(1, 21))
    generator.generate([Request(shared, 2), Request([30, 31], 2)])
    requests = [Request([40], 1), Request([*shared, 5], 1)]
    alone = [Generator(model, 64).generate([request])[0].ids for request in requests]
    assert [answer.ids for answer in generator.generate(requests)] == alone
