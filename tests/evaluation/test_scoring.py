"""Scores of continuations equal those of one full pass per request, however the requests overlap and are batched."""

from __future__ import annotations

import functools
import gc
import math
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.evaluation.scoring import WORTH_READING_ONCE, Request, Score, build_tree, score, shares
from llmstack.inference.generate import inference_form
from llmstack.model import Llama, ModelConfig
from llmstack.training.probe import probe
from llmstack.training.step import micro_batch_loss

VOCAB, STEPS, LONGEST = 97, 30, 128
FAKE = {"start_mlp": 2, "start_qk": 4, "start_v": 6, "start_final": 8, "gap_mlp": 1, "gap_qk": 1, "gap_v": 1}
NORMS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("rmsnorm", "bhyt", "dyt", "peri_ln", "post_ln")},
    "tapernorm_all": {"method": "tapernorm_all", "taper_start": 0.1, "taper_end": 0.5},
    "fake_ln": {"method": "fake_ln", **FAKE},
}
FIRST_APART = {"method": "fake_ln", "first_token": True, "start_merge": 20, **FAKE}
"""At step 12 all sites of this FakeLN have a scale, and the first token of a sequence has another one."""


def build(norm: dict[str, Any], last: int = STEPS, **options: Any) -> Llama:
    """A narrow model after a few steps that move the gains far, to what its norms become in a training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    values = {"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "initializer_range": 0.1, **sizes, **options}
    model = Llama(ModelConfig(**values, norm=norm))
    method = model.config.norm_method
    rows = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "valid_tokens": 32}
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for step in range(1, last + 1):
        observed = method.observed(model, step, STEPS)
        sums = probe(model, batch, observed) if observed else {}
        loss, own = micro_batch_loss(model, batch)
        (loss if own is None else loss + own).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        method.after_step(model, step, STEPS, sums=sums)
    return model.eval()


@functools.cache
def trained(norm: str, **options: Any) -> Llama:
    """Not to be changed: the tests share it."""
    return build(NORMS[norm], **options)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_known: weakref.WeakKeyDictionary[Llama, dict[str, Score]] = weakref.WeakKeyDictionary()


def by_itself(model: Llama, request: Request, window: int) -> Score:
    """One request, one pass over all it sees, without a cache of keys and values."""
    known = _known.setdefault(model, {})
    key = f"{request} {window}"
    if key not in known:
        known[key] = in_one_pass(model, request, window) if request.continuation else Score(0.0, True)
    return known[key]


@torch.no_grad()
def in_one_pass(model: Llama, request: Request, window: int) -> Score:
    context, continuation = request
    ids = [*context, *continuation][-(window + 1) : -1]
    logits = model(torch.tensor([ids]))[0, -len(continuation) :]
    wanted = torch.tensor(continuation)
    logprobs = logits.double().log_softmax(-1)[torch.arange(len(wanted)), wanted]
    return Score(float(logprobs.sum()), bool((logits.argmax(-1) == wanted).all()))


def found(model: Llama, requests: Sequence[Request], **options: Any) -> list[Score]:
    """In the order of ``requests``; each must be answered once."""
    scores = list(score(model, requests, **{"window": 64, "batch_tokens": 400, **options}))
    assert sorted(place for place, _ in scores) == list(range(len(requests)))
    return [one for _, one in sorted(scores)]


def agree(ours: Sequence[Score], expected: Sequence[Score], tolerance: float = 1e-4) -> None:
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in expected], abs=tolerance, rel=1e-5)
    assert [one.greedy for one in ours] == [one.greedy for one in expected]


def check(model: Llama, requests: Sequence[Request], reference: Llama | None = None, **options: Any) -> None:
    window = options.get("window", 64)
    agree(found(model, requests, **options), [by_itself(reference or model, one, window) for one in requests])


def ids(number: int, seed: int = 0) -> list[int]:
    """From 1 on, so that 0 is padding alone."""
    return random.Random(f"{number} {seed}").choices(range(1, VOCAB), k=number)


@torch.no_grad()
def greedy(model: Llama, context: list[int], number: int) -> list[int]:
    """What the model continues ``context`` with."""
    seen = list(context)
    for _ in range(number):
        seen.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
    return seen[len(context) :]


def all_kinds(model: Llama, window: int = 64) -> list[Request]:
    """Every way in which requests may overlap, in a random order."""
    shots = ids(WORTH_READING_ONCE + 5)
    questions = [[*shots, *ids(6, seed)] for seed in range(3)]
    requests = [Request(question, ids(length, length)) for question in questions for length in (1, 2, 5, 20)]
    # A second level worth reading once, and a beginning that is not.
    deep = [*shots[:10], *ids(WORTH_READING_ONCE + 2, 7)]
    requests += [Request([*deep, *ids(4, seed)], ids(3, seed)) for seed in range(3)]
    requests += [Request(shots[:3], choice) for choice in (ids(1), ids(4), shots[3:5])]
    # Choices over one context that is longer than the window: each loses another beginning.
    requests += [Request(ids(window + 9, 1), ids(length, 4)) for length in (1, 3, 8, 20)]
    # Nested contexts, and texts whose own continuation is the context of others.
    requests += [Request(shots[:length], shots[length : length + 1]) for length in range(1, 12)]
    # Every length around the window, down to a continuation that fills it.
    requests += [Request(ids(length, 2), ids(3, 3)) for length in range(max(window - 5, 1), window + 4)]
    requests += [Request(ids(4, 5), ids(length, 6)) for length in range(max(window - 3, 1), window + 1)]
    # What the model says itself, and all of that but the last token.
    own = greedy(model, questions[0], 5)
    requests += [Request(questions[0], own), Request(questions[0], [*own[:4], (own[4] + 1) % VOCAB])]
    requests += [Request(questions[0], own[:1]), Request([*questions[0], *own[:2]], own[2:])]
    requests += [Request(shots, []), Request([1], [])]
    requests += requests[::3]
    random.Random(0).shuffle(requests)
    return requests


@pytest.mark.parametrize("form", ["as it is", "folded", "unfolded"])
@pytest.mark.parametrize("norm", NORMS)
def test_scores_are_those_of_one_pass_per_request(norm: str, form: str) -> None:
    model = trained(norm)
    requests = all_kinds(model)
    assert sum(by_itself(model, one, 64).greedy for one in requests if one.continuation) >= 3
    check(model if form == "as it is" else inference_form(model, form == "folded"), requests, model)


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("norm", ["rmsnorm", "bhyt"])
def test_positions_are_counted_from_the_start_of_each_request(norm: str, positions: str) -> None:
    model = trained(norm, positions=positions)
    check(model, all_kinds(model))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_number_of_key_value_heads(kv_heads: int) -> None:
    model = trained("rmsnorm", num_kv_heads=kv_heads, lm_head_bias=True, tie_word_embeddings=False)
    check(model, all_kinds(model))


@pytest.mark.parametrize("batch_tokens", [1, 90, 2**62])
@pytest.mark.parametrize("batch_rows", [1, 4, 10, None])
def test_batches_of_any_size_give_the_same_scores(batch_rows: int | None, batch_tokens: int) -> None:
    model = trained("rmsnorm")
    check(model, all_kinds(model), batch_rows=batch_rows, batch_tokens=batch_tokens)


@pytest.mark.parametrize("window", [4, 40, LONGEST])
def test_windows_of_any_length(window: int) -> None:
    model = trained("rmsnorm")
    requests = [one for one in all_kinds(model, window) if len(one.continuation) <= window]
    check(model, requests, window=window)


@pytest.mark.parametrize("in_parts", [True, False])
def test_random_requests_over_few_tokens(in_parts: bool) -> None:
    """Of two ids, so that they share beginnings of every length."""
    model = trained("rmsnorm")
    for seed in range(12):
        chance = random.Random(seed)
        window = chance.choice([3, 17, 45, 70])
        trunk = chance.choices([1, 2], k=120)
        requests = []
        for _ in range(chance.randint(1, 40)):
            context = [*trunk[: chance.randint(1, 100)], *chance.choices([1, 2], k=chance.randint(0, 9))]
            requests.append(Request(context, chance.choices([1, 2, 3], k=chance.randint(0, min(window, 6)))))
        check(model, requests, window=window, batch_tokens=chance.choice([1, 100, 1000]), in_parts=in_parts)


def test_a_first_token_that_is_treated_apart_is_that_of_each_request() -> None:
    """Such a model is not read in parts, and no row begins twice: not even where all requests would fit into one."""
    model = build(FIRST_APART, last=12)
    several = [Request([first, *ids(3)], choice) for first in (1, 2, 3) for choice in ([4], [5, 6])]
    for requests in (several, all_kinds(model)):
        check(model, requests, in_parts=False)
    with pytest.raises(AssertionError):  # the test can tell
        check(model, all_kinds(model), in_parts=True)


def test_a_tree_deeper_than_recursion_can_go() -> None:
    """A node for each token of a text: the choices after every beginning of it. All are seen by one pass over it."""
    depth = sys.getrecursionlimit() + 100
    model = build({"method": "rmsnorm"}, last=3, max_position_embeddings=depth + 2)
    text = ids(depth)
    requests = [Request(text[:length], [choice]) for length in range(1, depth + 1) for choice in (5, 6)]
    branching = [Request([*text[:length], choice], [7]) for length in range(1, depth) for choice in (5, 6)][::40]
    with torch.no_grad():
        logprobs = model(torch.tensor([text]))[0].double().log_softmax(-1)
    best = logprobs.argmax(-1).tolist()
    expected = [
        Score(float(logprobs[len(one.context) - 1, one.continuation[0]]), best[len(one.context) - 1] == choice)
        for one in requests
        for choice in one.continuation
    ]
    expected += [by_itself(model, one, depth + 2) for one in branching]
    agree(found(model, requests + branching, window=depth + 2, batch_tokens=4096), expected)


class Watched:
    """A model that counts what it computes; ids of 0 are padding."""

    def __init__(self, model: Llama, fits: int | None = None) -> None:
        self._model, self._fits, self.calls, self.rows = model, fits, list[int](), list[int]()
        self.tensors: list[weakref.ref[Tensor]] = []
        self.alive_in_time: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def real(self) -> int:
        return sum(self.calls)

    def hidden_states(self, input_ids: Tensor, **context: Any) -> Tensor:
        if self._fits is not None and input_ids.numel() > self._fits:
            held = torch.zeros(10)
            self.tensors.append(weakref.ref(held))
            raise torch.OutOfMemoryError(f"{input_ids.numel()} tokens do not fit")
        self.calls.append(int((input_ids > 0).sum()))
        self.rows.append(len(input_ids))
        return self._model.hidden_states(input_ids, **context)

    def forget(self) -> None:
        """What of the failed pass is still in memory."""
        gc.collect()
        self.alive_in_time.append(sum(one() is not None for one in self.tensors))


def distinct(requests: Sequence[Request]) -> int:
    """Nodes of the tree of tokens: the different beginnings of what the model reads."""
    inputs = [(*one.context, *one.continuation)[:-1] for one in requests]
    return len({one[:end] for one in inputs for end in range(1, len(one) + 1)})


@pytest.mark.parametrize("levels", [1, 2])
def test_each_token_is_computed_once(levels: int) -> None:
    """Few-shot examples, questions and choices; with two levels, under each of several subjects."""
    model = trained("rmsnorm")
    shots = ids(WORTH_READING_ONCE)
    if levels == 2:
        subjects = [[*shots, 90 + number, *ids(WORTH_READING_ONCE, number)] for number in range(3)]
    else:
        subjects = [shots]
    questions = [[*subject, 50 + number, *ids(9, number)] for subject in subjects for number in range(7)]
    requests = [Request(question, [choice, *ids(length)]) for question in questions for choice, length in
                ((1, 0), (2, 3), (3, 8), (4, 20))]  # fmt: skip
    whole = sum(len(one.context) + len(one.continuation) - 1 for one in requests)
    for options in ({}, {"batch_rows": 1}, {"batch_rows": 3, "batch_tokens": 2**62}):
        watched = Watched(model)
        check(watched, requests, model, window=LONGEST, **options)
        assert watched.real == distinct(requests) < whole / 3
        assert max(watched.rows) <= options.get("batch_rows", 10**9)


def test_a_beginning_that_is_too_short_to_be_read_once_costs_its_length_per_row_at_most() -> None:
    model = trained("rmsnorm")
    beginning = ids(WORTH_READING_ONCE - 1)
    requests = [Request([*beginning, 50 + number, *ids(20, number)], [5]) for number in range(8)]
    watched = Watched(model)
    check(watched, requests, model)
    assert distinct(requests) <= watched.real <= distinct(requests) + sum(watched.rows) * len(beginning)
    # Of BOS alone nothing is worth a pass of its own.
    watched = Watched(model)
    requests = [Request([1, 50 + number, *ids(50, number)], [5]) for number in range(8)]
    check(watched, requests, model)
    assert watched.real <= distinct(requests) + len(requests)


@pytest.mark.parametrize("fits", [200, 110, 64])
def test_what_does_not_fit_the_memory_is_halved_until_it_does(fits: int) -> None:
    model = trained("rmsnorm")
    requests = all_kinds(model)
    watched = Watched(model, fits)
    check(watched, requests, model, batch_tokens=2**62, forget_memory=watched.forget)
    # It is forgotten when nothing holds it any more, and the size that does not fit is not tried again and again.
    assert watched.alive_in_time == [0] * len(watched.tensors)
    assert 1 <= len(watched.tensors) <= 8


def test_a_row_that_does_not_fit_by_itself_is_an_error() -> None:
    watched = Watched(trained("rmsnorm"), fits=63)
    with pytest.raises(torch.OutOfMemoryError, match="64 tokens do not fit"):
        found(watched, all_kinds(trained("rmsnorm")))


def test_scores_are_given_as_they_are_found() -> None:
    """An evaluation that is stopped has kept what it had."""
    model = trained("rmsnorm")
    watched = Watched(model)
    requests = [Request(ids(40, number), [5]) for number in range(6)]
    for seen, _ in enumerate(score(watched, requests, window=64, batch_tokens=1, batch_rows=1), start=1):
        assert len(watched.calls) == seen


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], [1]), "an empty context"),
        (Request([1], [2] * 65), "a continuation of 65 tokens is longer than the window of 64"),
        (Request([1, VOCAB], [2]), f"id {VOCAB} is outside the model's vocabulary, 0 to {VOCAB - 1}"),
        (Request([1], [VOCAB + 3]), f"id {VOCAB + 3} is outside the model's vocabulary"),
        (Request([1], [-1, 2]), "id -1 is outside the model's vocabulary"),
        (Request([-1], [2]), "id -1 is outside the model's vocabulary"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_computed(request_: Request, message: str) -> None:
    watched = Watched(trained("rmsnorm"))
    with pytest.raises(UserError, match=message):
        found(watched, [Request([1], [2]), request_])
    assert not watched.calls


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_an_error(broken: float) -> None:
    model = deepcopy(trained("rmsnorm"))
    with torch.no_grad():
        model.blocks[1].mlp.down_proj.weight[3, 3] = broken
    with pytest.raises(UserError, match="probabilities are not finite"):
        found(model, all_kinds(model))


def test_nothing_asked_is_nothing_computed() -> None:
    watched = Watched(trained("rmsnorm"))
    assert found(watched, []) == []
    assert found(watched, [Request([1], []), Request([1, 2], [])]) == [Score(0.0, True)] * 2
    assert not watched.calls


@pytest.mark.parametrize("number", [1, 2, 3, 7, 100])
def test_shares_hold_every_request_once(number: int) -> None:
    requests = all_kinds(trained("rmsnorm"))
    parts = shares(requests, number)
    assert len(parts) == number
    assert sorted(chain.from_iterable(parts)) == list(range(len(requests)))
    longest = max(len(one.context) + len(one.continuation) for one in requests)
    sizes = [sum(len(requests[place].context) + len(requests[place].continuation) for place in part) for part in parts]
    assert max(sizes) <= sum(sizes) / number + longest
    # Computed by as many as there are shares, one of which may be empty, the scores are the same.
    model = trained("rmsnorm")
    scores = {}
    for part in parts:
        scores |= dict(zip(part, found(model, [requests[place] for place in part]), strict=True))
    agree([scores[place] for place in range(len(requests))], found(model, requests))


def test_shares_of_few_or_no_requests() -> None:
    for few in range(3):
        requests = [Request([1], [2])] * few
        parts = shares(requests, 4)
        assert len(parts) == 4
        assert sorted(chain.from_iterable(parts)) == list(range(few))
    assert sorted(chain.from_iterable(shares([Request([], [])] * 3, 2))) == [0, 1, 2]


def test_what_begins_alike_shares_a_share() -> None:
    """Two tasks of equal size for two ranks: each reads one few-shot beginning."""
    requests = [Request([*ids(30, number % 2), number], [5]) for number in range(20)]
    first, second = shares(requests, 2)
    assert {place % 2 for place in first} != {place % 2 for place in second}
    assert all(len({place % 2 for place in part}) == 1 for part in (first, second))


def test_no_two_children_of_a_node_begin_alike_and_every_input_is_a_path() -> None:
    requests = [one for one in all_kinds(trained("rmsnorm")) if one.continuation]
    inputs = [[*one.context, *one.continuation][-65:-1] for one in requests]
    root = build_tree(inputs, requests)
    paths, tokens, waiting = set(), 0, [(root, ())]
    while waiting:
        node, before = waiting.pop()
        path = (*before, *node.ids[node.start : node.end])
        starts = [child.ids[child.start] for child in node.children]
        assert len(starts) == len(set(starts))
        assert node.tokens == node.length + sum(child.tokens for child in node.children)
        assert all(child.parent is node and child.start == node.end and child.length for child in node.children)
        tokens += node.length
        paths |= {path[:end] for end in range(len(path) + 1)}
        waiting += [(child, path) for child in node.children]
    assert {tuple(one) for one in inputs} <= paths
    assert tokens == root.tokens == len(paths) - 1


@pytest.mark.parametrize("form", ["as it is", "folded"])
@pytest.mark.parametrize("norm", ["rmsnorm", "bhyt"])
def test_in_bf16_the_scores_cost_no_more_than_bf16_itself(norm: str, form: str) -> None:
    """Against fp32 arithmetic of the same weights: as far as one pass per request in bf16 is, about."""
    low = deepcopy(trained(norm)).to(torch.bfloat16)
    exact = deepcopy(low).float()
    requests = [one for one in all_kinds(low) if one.continuation]
    expected = [by_itself(exact, one, 64).logprob / len(one.continuation) for one in requests]

    def off(scores: Sequence[Score]) -> float:
        mean = [one.logprob / len(request.continuation) for one, request in zip(scores, requests, strict=True)]
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(mean, expected, strict=True)) / len(mean))

    ours = off(found(inference_form(low, form == "folded"), requests))
    assert 0 < ours < 1.5 * max(off([by_itself(low, one, 64) for one in requests]), 5e-3)


def test_a_half_of_the_numbers_at_once_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is applied to some rows of the logits at a time: here to three."""
    model = trained("rmsnorm")
    expected = found(model, all_kinds(model))
    monkeypatch.setattr("llmstack.evaluation.scoring._LOGITS_AT_ONCE", 3 * VOCAB)
    largest = 0
    forward: Callable[..., Tensor] = model.lm_head.forward

    def watched(hidden: Tensor, *arguments: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, hidden.shape[0])
        return forward(hidden, *arguments)

    monkeypatch.setattr(model.lm_head, "forward", watched)
    agree(found(model, all_kinds(model)), expected, 1e-5)
    assert largest == 3


def test_compiled_blocks_are_few_graphs_and_give_the_same() -> None:
    """As on a GPU, by default: whatever the lengths, batches and shared beginnings, a known number of graphs."""
    torch._dynamo.reset()
    model = trained("rmsnorm")

    def text(length: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(VOCAB), k=length)

    requests = [
        Request(tuple(text(length, seed)), tuple(text(answer, seed + 100)))
        for seed, (length, answer) in enumerate([(3, 1), (9, 4), (17, 2), (30, 5), (41, 3)])
        for _ in range(2)
    ]
    shots = text(40, 7)
    for seed in range(12):
        question = [*shots, *text(9, 50 + seed)]
        requests += [Request(tuple(question), tuple(text(3 + choice, 200 + 9 * seed + choice))) for choice in range(4)]
    plain = [one for _, one in sorted(score(model, requests, window=64, batch_tokens=256))]
    compiled = inference_form(model, fold=False)
    for block in compiled.blocks:
        block.forward = torch.compile(block.forward, dynamic=True, backend="eager")  # type: ignore[method-assign]
    torch._dynamo.utils.counters.clear()
    for batch_tokens in (64, 100, 256, 1000):
        found = [one for _, one in sorted(score(compiled, requests, window=64, batch_tokens=batch_tokens))]
        assert [one.greedy for one in found] == [one.greedy for one in plain]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(found, plain, strict=True)) < 1e-4
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] <= 8
    assert not counters["graph_break"]
