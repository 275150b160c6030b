"""Autoregressive generation: prompts go into the rows of a static cache, then all rows go on token by token."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.inference.linear import Weights, quantise, stream_on_cpu
from llmstack.inference.reading import decode_rows, read_texts
from llmstack.inference.requests import GREEDY, Completion, Finish, Request, Token, collect
from llmstack.inference.runner import CachedRunner, Runner, UncachedRunner
from llmstack.inference.sampling import Sampler, Sampling, sample_rows
from llmstack.inference.speculation import (
    Acceptance,
    Begun,
    Draft,
    ModelDraft,
    PromptLookup,
    Proposal,
    common_length,
    verified,
)
from llmstack.inference.text import TextStream
from llmstack.model import Llama
from llmstack.model.norms.fold import fold as fold_norms
from llmstack.model.norms.fold import inference_copy, is_folded
from llmstack.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

CHUNK = 512
"""Tokens of a prompt that are read at a time: large enough for full matrix speed, small enough for the memory."""

WORTH_SHARING = 16
"""Tokens that prompts of one batch must have in common to be read once and copied."""


@dataclass
class _Row:
    """A request under way."""

    number: int
    request: Request
    ids: list[int]
    """Prompt and continuation."""
    sampler: Sampler
    text: TextStream | None
    read: int = 0
    """How many of them the model has read."""
    new: int = 0
    """Tokens of the continuation."""

    def take(self, token: int, logits: Tensor) -> Token:
        """Append ``token``, found from ``logits`` [vocab] when all before it had been read."""
        request = self.request
        self.read = len(self.ids)
        self.ids.append(token)
        self.new += 1
        text = self.text.push(token) if self.text is not None else ""
        finish: Finish | None = None
        if token in request.stop_ids or (self.text is not None and self.text.stopped):
            finish = "stop"
        elif self.new == request.max_new_tokens:
            finish = "length"
        if finish is not None and self.text is not None:
            text += self.text.flush()
        if request.logprobs is None:
            return Token(self.number, token, text, finish)
        known = logits.float().log_softmax(-1)
        best = known.topk(min(request.logprobs, len(known)))
        alternatives = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Token(self.number, token, text, finish, float(known[token]), alternatives)


@dataclass
class _Slot:
    """A row of the batch."""

    index: int
    row: _Row | None = None
    held: list[int] = field(default_factory=list)
    """Without a request: the ids that the last one left in the cache, from position 0 on."""

    @property
    def under_way(self) -> _Row:
        """The request in it."""
        assert self.row is not None
        return self.row

    @property
    def read(self) -> list[int]:
        """Ids whose keys and values lie in the cache."""
        return self.held if self.row is None else self.row.ids[: self.row.read]

    def take(self, token: int, logits: Tensor) -> Token:
        """Append ``token``; the row is free if it is the last one."""
        taken = self.under_way.take(token, logits)
        if taken.finish is not None:
            self.end()
        return taken

    def end(self) -> None:
        """Free the row."""
        self.row, self.held = None, self.read


class Generator:
    """Continues prompts with one model in memory that is allocated once.

    The model runs in its folded form (``fold.py``): the same function, with the gains of its norms inside the matrices
    that follow. Where norms are half removed it cannot be folded; then a warning says so and it runs as it is.

    :meth:`stream` continues one prompt and gives its ids; :meth:`run` any number of requests, ``batch_size`` at a time,
    and gives tokens of all as they are found; :meth:`generate` collects them. A row that ends takes the next request.
    Each request gets the same tokens whatever else is under way (in floating point: up to the rounding of products that
    are computed for more rows at a time). Only one of these is open at a time: the next one ends it.

    Args:
        model: stays as it is.
        max_length: positions of the cache, the most tokens of a prompt and its continuation together.
        batch_size: rows that go on at the same time.
        compile: compile the decoding step, on a GPU into a CUDA graph.
        fold: off: keep the norms explicit.
        weights: int8 or int4: store the matrices so (of a model in bf16; torchao finds the numbers); none: as they are.
        cache_dtype: of cached keys and values (int8: with a scale for each vector); none: that of the weights.
        use_cache: off: a full forward pass for every token. Slow; it proves the cache right.
        vocab_size: draw ids below this alone; none: the tokenizer's, or all that the model has. Where the embedding is
            padded, ids without a text could be drawn otherwise.
        tokenizer: for text in the answers, and for stop strings.
        chunk: tokens of a prompt that are read at a time.
        keep_prefixes: start from what the rows still hold of earlier prompts that begin alike.
        draft: a smaller model of the same vocabulary, or :class:`PromptLookup`, that proposes tokens for the model to
            check several at a time. What is drawn has the same distribution; greedy ids are the same.
        draft_tokens: how many are proposed at a time.

    Raises:
        UserError: a length, number or combination that is impossible, or a norm that cannot decode.
    """

    def __init__(
        self,
        model: Llama,
        max_length: int,
        *,
        batch_size: int = 1,
        compile: bool = False,
        fold: bool = True,
        weights: Weights | None = None,
        cache_dtype: torch.dtype | None = None,
        use_cache: bool = True,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        chunk: int = CHUNK,
        keep_prefixes: bool = False,
        draft: Llama | PromptLookup | None = None,
        draft_tokens: int = 4,
    ) -> None:
        limit = model.config.max_position_embeddings
        if not 1 <= max_length <= limit:
            raise UserError(f"generation: {max_length} positions asked for; the model has 1 to {limit}")
        if compile and not use_cache:
            raise UserError("generation: the compiled step needs the cache; turn one of the two choices round")
        for name, value in (("batch_size", batch_size), ("chunk", chunk), ("draft_tokens", draft_tokens)):
            if value < 1:
                raise UserError(f"generation: {name} is {value}; it must be at least 1")
        self.max_length, self.batch_size = max_length, batch_size
        self.positions_of_model = limit
        self.vocab_size = model.embed_tokens.num_embeddings
        self.drawn_vocab_size = vocab_size or (tokenizer.vocab_size if tokenizer is not None else self.vocab_size)
        self.tokenizer = tokenizer
        self.runner = _runner(model, batch_size, max_length, compile, fold, weights, cache_dtype, use_cache)
        self._chunk, self._keep_prefixes = chunk, keep_prefixes
        self.acceptance = Acceptance()
        self.draft = self._draft(draft, compile, fold, draft_tokens)
        self._slots = [_Slot(index) for index in range(batch_size)]
        self._runs = 0

    def _draft(self, draft: Llama | PromptLookup | None, compile: bool, fold: bool, tokens: int) -> Draft | None:
        if not isinstance(draft, Llama):
            return draft
        if draft.embed_tokens.num_embeddings != self.vocab_size:
            raise UserError(
                f"generation: the draft model has {draft.embed_tokens.num_embeddings} ids, the model "
                f"{self.vocab_size}; both must have the same tokenizer"
            )
        length = draft.config.max_position_embeddings
        if length < self.max_length:
            raise UserError(
                f"generation: the draft model has {length} positions, fewer than the {self.max_length} asked for"
            )
        runner = _runner(draft, self.batch_size, self.max_length, compile, fold, None, None, use_cache=True)
        return ModelDraft(runner, tokens, self.drawn_vocab_size, self._chunk)

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """New ids as they are found: up to ``max_new_tokens``, or to the first of ``stop_ids``, which is given too.

        Raises:
            UserError: empty prompt, an id outside the vocabulary, or more tokens than there are positions.
        """
        tokens = self.run([Request(prompt_ids, max_new_tokens, sampling, stop_ids)])
        return (token.id for token in tokens)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The completion of each request. Raises as :meth:`run` does."""
        return collect(self.run(requests), len(requests))

    def run(self, requests: Sequence[Request]) -> Iterator[Token]:
        """Tokens of all ``requests`` as they are found; those of one request in order.

        A run that is still open when the next one starts is dead (they share the cache): reading on from it raises
        ``RuntimeError``.

        Raises:
            UserError: a request that is impossible; none has been begun then.
        """
        for request in requests:
            self.check(request)
        self._runs += 1
        return self._run(deque(enumerate(requests)), self._runs)

    def _run(self, waiting: deque[tuple[int, Request]], run: int) -> Iterator[Token]:
        self._refuse_ended(run)
        self._release_all()
        if not self._keep_prefixes:
            # Masked positions have weight 0, yet 0·NaN is NaN: nothing that an earlier run left may survive.
            self._clear()
        while waiting or self.under_way:
            first = [waiting.popleft() for _ in range(min(self.free, len(waiting)))]
            tokens = self.admit(first) if first else self.step()
            for token in tokens:
                yield token
                self._refuse_ended(run)

    def _refuse_ended(self, run: int) -> None:
        if run != self._runs:
            raise RuntimeError("this stream has ended: its generator has been given another prompt")

    def check(self, request: Request) -> None:
        """Whether ``request`` is possible.

        Raises:
            UserError: it is not.
        """
        prompt, new = request.prompt_ids, request.max_new_tokens
        if not prompt:
            raise UserError("generation: the prompt is empty; give at least one token (such as BOS)")
        for token in (*prompt, *request.sampling.logit_bias):
            if not 0 <= token < self.vocab_size:
                raise UserError(f"generation: id {token} is outside the model's vocabulary, 0 to {self.vocab_size - 1}")
        if new < 1:
            raise UserError(f"generation: {new} new tokens asked for; at least 1 is needed")
        if request.stop_strings and self.tokenizer is None:
            raise UserError("generation: stop strings need a tokenizer; give stop ids")
        total = len(prompt) + new
        if total > self.max_length:
            have = f"the model has {self.positions_of_model} positions"
            if self.max_length < self.positions_of_model:
                have = f"this generator was made for {self.max_length} (the model has {self.positions_of_model})"
            raise UserError(
                f"generation: {len(prompt)} prompt tokens + {new} new ones are {total}, but {have}; shorten one of them"
            )

    def warm_up(self) -> None:
        """Compile what decoding needs before the first prompt comes. Ends an open run."""
        self._runs += 1
        self._release_all()
        for width in {1, 1 + (self.draft.tokens if self.draft is not None else 0)}:
            decode_rows(self.runner, {}, width)
        if isinstance(self.draft, ModelDraft):
            self.draft.warm_up()

    @property
    def free(self) -> int:
        """Rows without a request."""
        return sum(slot.row is None for slot in self._slots)

    @property
    def under_way(self) -> bool:
        """Whether any row has a request."""
        return self.free < self.batch_size

    def release(self, number: int) -> None:
        """Give up request ``number``: its row is free."""
        for slot in self._slots:
            if slot.row is not None and slot.row.number == number:
                slot.end()

    def admit(self, requests: Sequence[tuple[int, Request]]) -> list[Token]:
        """Read the prompts of numbered ``requests`` into free rows; the first token of each."""
        assert len(requests) <= self.free, "more requests than free rows"
        if not requests:
            return []
        with self._forgetting_on_error():
            begun = [self._begin(number, request) for number, request in requests]
            begun.sort(key=lambda slot: slot.index)
            self._share_prefixes(begun)
            # Before any of them takes a token: it may be its last.
            groups: dict[int, list[_Slot]] = {}
            for slot in begun:
                groups.setdefault(slot.under_way.read, []).append(slot)
            tokens = []
            for start, group in sorted(groups.items()):
                tokens += self._take(group, self._read(group, start))
            return tokens

    def step(self) -> list[Token]:
        """The next token of every request under way; several, where a draft proposes."""
        with self._forgetting_on_error():
            going = [slot for slot in self._slots if slot.row is not None]
            proposals = self._proposals(going)
            fed = {}
            for slot in going:
                ids, proposal = slot.under_way.ids, proposals.get(slot.index)
                fed[slot.index] = (len(ids) - 1, ids[-1:] + (proposal.ids if proposal is not None else []))
            width = 1 + (self.draft.tokens if self.draft is not None and proposals else 0)
            logits = decode_rows(self.runner, fed, width)[..., : self.drawn_vocab_size]
            proposed = [slot for slot in going if slot.index in proposals]
            others = [slot for slot in going if slot.index not in proposals]
            tokens = self._take(others, logits[[slot.index for slot in others], 0])
            for slot in proposed:
                tokens += self._take_verified(slot, logits[slot.index], proposals[slot.index])
            return tokens

    def _begin(self, number: int, request: Request) -> _Slot:
        """A free row for ``request``: the one that knows most of its prompt already, where that is wanted."""
        free = [slot for slot in self._slots if slot.row is None]
        prompt = list(request.prompt_ids)
        # Of rows that know equally much the one that has least to lose.
        slot = max(free, key=lambda one: (self._known(one, prompt), -len(one.held)))
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, request.stop_strings, request.stop_ids)
        known = self._known(slot, prompt)
        slot.row = _Row(number, request, prompt, Sampler(request.sampling, prompt), text, known)
        return slot

    def _known(self, slot: _Slot, prompt: list[int]) -> int:
        """Tokens of ``prompt`` that ``slot`` has read; never its last one, whose logits are wanted."""
        return min(common_length(slot.read, prompt), len(prompt) - 1) if self._keep_prefixes else 0

    def _share_prefixes(self, begun: list[_Slot]) -> None:
        """Copy what another row has read already, and read once what all new prompts begin with."""
        for slot in begun:
            row = slot.under_way
            source = max(self._slots, key=lambda one: self._known(one, row.ids))
            if (known := self._known(source, row.ids)) > row.read:
                self.runner.copy_row(source.index, slot.index, known)
                row.read = known
        first, *others = begun
        shared = min((common_length(first.under_way.ids, slot.under_way.ids[:-1]) for slot in others), default=0)
        shared = min(shared, len(first.under_way.ids) - 1)
        if shared - max(slot.under_way.read for slot in begun) < WORTH_SHARING:
            return
        read_texts(self.runner, [first.index], [first.under_way.ids[:shared]], first.under_way.read, self._chunk)
        for slot in begun:
            if slot is not first:
                self.runner.copy_row(first.index, slot.index, shared)
            slot.under_way.read = shared

    def _read(self, group: list[_Slot], start: int) -> Tensor:
        """Read the prompts of ``group`` from ``start`` on -> logits [group, drawn vocab] of what follows each."""
        rows, texts = [slot.index for slot in group], [slot.under_way.ids for slot in group]
        return read_texts(self.runner, rows, texts, start, self._chunk)[:, : self.drawn_vocab_size]

    def _proposals(self, going: list[_Slot]) -> dict[int, Proposal]:
        if self.draft is None:
            return {}
        rows = {}
        for slot in going:
            row = slot.under_way
            # One less than there is room for: the last token of all is found, not read.
            limit = min(self.max_length - 1 - len(row.ids), row.request.max_new_tokens - row.new - 1)
            if limit > 0:
                rows[slot.index] = Begun(row.ids, row.request.sampling, limit)
        proposals = self.draft.propose(rows) if rows else {}
        return {index: kept for index, found in proposals.items() if (kept := found.below(self.drawn_vocab_size)).ids}

    def _take(self, slots: list[_Slot], logits: Tensor) -> list[Token]:
        """The next token of each of ``slots`` from ``logits`` [slots, vocab]."""
        ids = sample_rows(logits, [slot.under_way.sampler for slot in slots]) if slots else []
        return [slot.take(token, own) for slot, token, own in zip(slots, ids, logits, strict=True)]

    def _take_verified(self, slot: _Slot, logits: Tensor, proposal: Proposal) -> list[Token]:
        """What follows in ``slot`` from ``logits`` [1 + proposals or more, vocab]."""
        tokens = []
        self.acceptance.proposed += len(proposal.ids)
        for place, (token, accepted) in enumerate(verified(slot.under_way.sampler, logits, proposal)):
            self.acceptance.accepted += accepted
            tokens.append(slot.take(token, logits[place]))
            if slot.row is None:
                break
        return tokens

    def _release_all(self) -> None:
        for slot in self._slots:
            slot.end()

    @contextmanager
    def _forgetting_on_error(self) -> Iterator[None]:
        """After an error nothing is under way, and nothing that it may have left is ever read."""
        try:
            yield
        except BaseException:
            for slot in self._slots:
                slot.row, slot.held = None, []
            self._clear()
            raise

    def _clear(self) -> None:
        self.runner.clear()
        if isinstance(self.draft, ModelDraft):
            self.draft.clear()


def _runner(
    model: Llama,
    batch_size: int,
    max_length: int,
    compile: bool,
    fold: bool,
    weights: Weights | None,
    cache_dtype: torch.dtype | None,
    use_cache: bool,
) -> Runner:
    if use_cache:
        model.config.norm_method.check_decoding(model)
    prepared = inference_form(model, fold, weights)
    if not use_cache:
        return UncachedRunner(prepared, batch_size, max_length)
    dtype = cache_dtype or model.embed_tokens.weight.dtype
    return CachedRunner(prepared, batch_size, max_length, dtype, compile)


def inference_form(model: Llama, fold: bool = True, weights: Weights | None = None) -> Llama:
    """A model of its own for inference over the weights of ``model``; folded, where that is wanted and possible.

    Args:
        model: stays as it is.
        fold: fold its norms.
        weights: as whole numbers; none: as they are, in bf16 on a CPU with the products made for it.

    Raises:
        UserError: as :func:`~llmstack.inference.linear.quantise` does.
    """
    prepared = _folded(model) if fold else inference_copy(model)
    if weights is None:
        stream_on_cpu(prepared)
    else:
        quantise(prepared, weights)
    return prepared


def _folded(model: Llama) -> Llama:
    if not is_folded(model):
        try:
            return fold_norms(model)
        except UserError as error:
            _logger.warning("%s; it runs as it is", error)
    return inference_copy(model)
