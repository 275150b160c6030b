"""Perplexity: every token of a text is predicted once, from BOS or from what precedes it in its window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.head import IGNORE_INDEX, LMHead

if TYPE_CHECKING:
    from llmstack.model import Llama
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

_SORTED_WINDOWS = 1024
"""Windows that a process sorts by length together: bounds memory on sources of any size."""

_TEXTS_AT_ONCE = 256
"""Texts whose ids are found together, on all cores where the tokenizer's library does that."""

_MOST_NATS = 700
"""Of a word: exp of more is no number."""


@dataclass(frozen=True)
class TokenSequence:
    """Ids whose first one is given and the others predicted, and what these stand for (None: not known)."""

    ids: list[int]
    num_bytes: int | None = None
    """UTF-8."""
    words: int | None = None
    """Runs of characters between whitespace."""


@dataclass(frozen=True)
class Perplexity:
    """Sum of -log p over the scored tokens. Texts without a scored token add nothing."""

    nats: float
    """Sum of -ln p."""
    tokens: int
    """Scored tokens."""
    num_bytes: int | None
    """UTF-8 bytes that they stand for; None where a text was cut."""
    documents: int
    """Texts."""
    words: int | None = None
    """Words between whitespace that the tokens stand for; None where a text was cut."""

    @property
    def nats_per_token(self) -> float:
        """Mean -ln p of a token; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable across tokenizers; None where the bytes are not known."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats per word), comparable across tokenizers; the tokens for whitespace count, as in lm-eval's metric of
        that name. None where the words are not known or, as in Chinese, not what stands between whitespace.
        """
        if not self.words or self.nats > _MOST_NATS * self.words:
            return None
        return math.exp(self.nats / self.words)


def wikitext_file(rows: Iterable[str]) -> str:
    """The raw file of a WikiText split, byte for byte, from the rows of its set on the hub.

    A row is a line with its newline; of a blank line, which in the file is a space, the set keeps the empty string. The
    perplexity guide of Hugging Face, and many tables of quantisation methods after it, join the rows by two newlines
    instead. That text has three newlines where the corpus has one, and five where it has a blank line: its figures
    count many tokens that the corpus does not have and that are easy to guess.
    """
    return "".join(row or " \n" for row in rows)


def token_sequences(
    texts: Iterable[str], tokenizer: Tokenizer, policy: BosEosPolicy, max_tokens: int | None = None
) -> Iterator[TokenSequence]:
    """BOS (where the policy has one) and the ids of each text, cut to ``max_tokens`` ids in all; no EOS.

    Without a BOS the first token has no context and is not scored; its bytes and words are left out, too.
    """
    left = iter(texts)
    while batch := list(islice(left, _TEXTS_AT_ONCE)):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if policy.bos:
                ids = type(policy)(bos=True, eos=False).wrap(ids, tokenizer)
            elif ids:
                text = tokenizer.decode(ids[1:])
            if max_tokens is not None and len(ids) > max_tokens:
                yield TokenSequence(ids[:max_tokens])
            else:
                yield TokenSequence(ids, len(text.encode("utf-8", "replace")), len(text.split()))


def rolling_windows(ids: list[int], window: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """(input ids, labels) of at most ``window`` positions each, so that ids 1, 2, … are each scored exactly once.

    The first window scores all its positions. Each later one moves on by ``stride`` (the last by what is left), scores
    the new ones, and is filled up with the tokens before them.
    """
    end = 0
    total = len(ids) - 1
    while end < total:
        scored_from, end = end, min(end + (stride if end else window), total)
        start = max(end - window, 0)
        yield ids[start:end], [IGNORE_INDEX] * (scored_from - start) + ids[scored_from + 1 : end + 1]


def score(
    model: Llama,
    sequences: Iterable[TokenSequence],
    *,
    window: int,
    stride: int | None = None,
    batch_tokens: int = 4096,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Perplexity of ``model`` over all tokens of ``sequences`` but the first of each.

    Several processes that are given the same sequences share the windows out. Each then knows the totals and the
    ``nats`` of its own windows, whose sum over the processes is that of one process.

    Args:
        model: in evaluation mode.
        sequences: read once, a part at a time.
        window: most input tokens that the model sees at once.
        stride: tokens between windows of a longer sequence; none: the window, which is fastest.
        batch_tokens: positions of one forward pass, padding included.
        share: number of this process, and how many there are.
        progress: called with the number of windows that this process has scored so far.

    Raises:
        UserError: a window outside the model's positions, a stride outside 1 … window, an id that the model does not
            have, a batch that the memory does not hold, or a loss that is not finite.
    """
    limit = model.config.max_position_embeddings
    stride = window if stride is None else stride
    if not 1 <= window <= limit:
        raise UserError(f"perplexity: the window is {window} tokens; this model allows 1 to {limit}")
    if not 1 <= stride <= window:
        raise UserError(f"perplexity: the stride is {stride} tokens; it must be from 1 to the window, {window}")
    totals = _Totals(model.embed_tokens.num_embeddings)
    windows = (part for sequence in totals.watch(sequences) for part in rolling_windows(sequence.ids, window, stride))
    number, processes = share
    nats, done = 0.0, 0
    while group := list(islice(windows, _SORTED_WINDOWS * processes)):
        mine = sorted(group, key=lambda part: len(part[0]))[number::processes]
        for batch in _batches(mine, batch_tokens):
            try:
                nats += _batch_nats(model, batch)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"perplexity: a batch of {len(batch)} x {len(batch[-1][0])} tokens does not fit into the memory; "
                    "give a smaller batch (--batch-tokens) or window"
                ) from error
            done += len(batch)
            if progress is not None:
                progress(done)
    if not math.isfinite(nats):
        raise UserError("perplexity: the model's loss is not finite; its weights are damaged or overflow their dtype")
    return Perplexity(nats, totals.tokens, totals.num_bytes, totals.documents, totals.words)


class _Totals:
    """Counts sequences as they pass, and refuses ids that the model does not have."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.documents = self.tokens = 0
        self.num_bytes: int | None = 0
        self.words: int | None = 0

    def watch(self, sequences: Iterable[TokenSequence]) -> Iterator[TokenSequence]:
        for sequence in sequences:
            if (highest := max(sequence.ids, default=0)) >= self._vocab_size:
                raise UserError(
                    f"perplexity: id {highest} is outside the model's vocabulary, 0 to {self._vocab_size - 1}; "
                    "is this the model's tokenizer?"
                )
            self.documents += 1
            self.tokens += max(len(sequence.ids) - 1, 0)
            self.num_bytes = _known_sum(self.num_bytes, sequence.num_bytes)
            self.words = _known_sum(self.words, sequence.words)
            yield sequence


def _known_sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _batches(
    windows: list[tuple[list[int], list[int]]], batch_tokens: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Runs of ``windows`` (shortest first) of at most ``batch_tokens`` padded positions, one window at least."""
    batch: list[tuple[list[int], list[int]]] = []
    for part in windows:
        if batch and (len(batch) + 1) * len(part[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


@torch.no_grad()
def _batch_nats(model: Llama, batch: list[tuple[list[int], list[int]]]) -> float:
    device = model.embed_tokens.weight.device
    # Padding on the right needs no mask: under causal attention no token sees what comes after it.
    inputs = _padded([ids for ids, _ in batch], 0).to(device)
    labels = _padded([labels for _, labels in batch], IGNORE_INDEX).to(device)
    head: nn.Module = model.lm_head
    hidden = model.hidden_states(inputs)
    if isinstance(head, LMHead):
        return float(head(hidden, labels).double().sum())
    # A head of whole numbers gives logits alone.
    logits = head(hidden).float().flatten(0, 1)
    return float(F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none").double().sum())


def _padded(rows: list[list[int]], value: int) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
