"""Token-level perplexity: every token of a text is predicted once, from BOS or from what precedes it in its window."""

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
"""Windows that are sorted by length together: bounds memory on sources of any size."""


@dataclass(frozen=True)
class TokenSequence:
    """Ids whose first one is given and the others predicted, and the UTF-8 bytes these stand for (None: not known)."""

    ids: list[int]
    num_bytes: int | None = None


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


def token_sequence(
    text: str, tokenizer: Tokenizer, policy: BosEosPolicy, max_tokens: int | None = None
) -> TokenSequence:
    """BOS (where the policy has one) and the ids of ``text``, cut to ``max_tokens`` ids in all; no EOS.

    Without a BOS the first token has no context and is not scored; its bytes are left out, too.
    """
    ids = tokenizer.encode(text)
    num_bytes: int | None = len(text.encode("utf-8", "replace"))
    if policy.bos:
        ids = type(policy)(bos=True, eos=False).wrap(ids, tokenizer)
    elif ids:
        num_bytes = len(tokenizer.decode(ids[1:]).encode())
    if max_tokens is not None and len(ids) > max_tokens:
        ids, num_bytes = ids[:max_tokens], None
    return TokenSequence(ids, num_bytes)


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
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Perplexity of ``model`` over all tokens of ``sequences`` but the first of each.

    Args:
        model: in evaluation mode.
        sequences: read once, a part at a time.
        window: most input tokens that the model sees at once.
        stride: tokens between windows of a longer sequence; none: the window, which is fastest.
        batch_tokens: positions of one forward pass, padding included.
        progress: called with the number of windows scored so far.

    Raises:
        UserError: a window outside the model's positions, a stride outside 1 … window, an id that the model does not
            have, or a loss that is not finite.
    """
    limit = model.config.max_position_embeddings
    stride = window if stride is None else stride
    if not 1 <= window <= limit:
        raise UserError(f"perplexity: the window is {window} tokens; this model allows 1 to {limit}")
    if not 1 <= stride <= window:
        raise UserError(f"perplexity: the stride is {stride} tokens; it must be from 1 to the window, {window}")
    totals = _Totals(model.embed_tokens.num_embeddings)
    windows = (part for sequence in totals.watch(sequences) for part in rolling_windows(sequence.ids, window, stride))
    nats, done = 0.0, 0
    while group := list(islice(windows, _SORTED_WINDOWS)):
        for batch in _batches(sorted(group, key=lambda part: len(part[0])), batch_tokens):
            nats += _batch_nats(model, batch)
            done += len(batch)
            if progress is not None:
                progress(done)
    if not math.isfinite(nats):
        raise UserError("perplexity: the model's loss is not finite; its weights are damaged or overflow their dtype")
    return Perplexity(nats, totals.tokens, totals.num_bytes, totals.documents)


class _Totals:
    """Counts sequences as they pass, and refuses ids that the model does not have."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.documents = self.tokens = 0
        self.num_bytes: int | None = 0

    def watch(self, sequences: Iterable[TokenSequence]) -> Iterator[TokenSequence]:
        for sequence in sequences:
            if (highest := max(sequence.ids, default=0)) >= self._vocab_size:
                raise UserError(
                    f"perplexity: id {highest} is outside the model's vocabulary, 0 to {self._vocab_size - 1}; "
                    "is this the model's tokenizer?"
                )
            self.documents += 1
            self.tokens += max(len(sequence.ids) - 1, 0)
            known = self.num_bytes is not None and sequence.num_bytes is not None
            self.num_bytes = (self.num_bytes or 0) + (sequence.num_bytes or 0) if known else None
            yield sequence


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
