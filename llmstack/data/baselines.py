"""Counting language models of the same tokens: what a trained network must be below.

Unigram: ``p1(t) = (c(t) + 1) / (N + V)`` (add-one). Bigram, interpolated (Jelinek and Mercer, 1980):
``p(t | s) = w c(s, t) / c(s) + (1 - w) p1(t)``, and ``p1(t)`` where s was never seen. The weight w is tuned
on the last tenth of the training tokens, with counts of the rest; the counts are then taken from all of them.
The held-out split is only scored. All tokens are held in memory.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmstack.data.prepared import PreparedData, bits_per_byte
from llmstack.errors import UserError

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class BaselineScore:
    """Score of a model on all held-out tokens but the first: those that evaluation blocks score."""

    nats_per_token: float
    perplexity: float
    bits_per_byte: float
    num_tokens: int


@dataclass(frozen=True)
class Baselines:
    """``bigram_weight`` is the tuned w."""

    unigram: BaselineScore
    bigram: BaselineScore
    bigram_weight: float


class CountModel:
    """Counts of a token stream, int64 [tokens]; probabilities of the tokens of another."""

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._unigram = (np.bincount(tokens, minlength=vocab_size) + 1) / (len(tokens) + vocab_size)
        self._pairs, self._pair_counts = np.unique(self._pair_ids(tokens), return_counts=True)
        self._contexts = np.bincount(tokens[:-1], minlength=vocab_size)

    def unigram(self, tokens: Tokens) -> NDArray[np.float64]:
        """p1 of each token but the first, [tokens - 1]."""
        return self._unigram[tokens[1:]]

    def bigram(self, tokens: Tokens, weight: float) -> NDArray[np.float64]:
        """Interpolated p of each token but the first given the one before, [tokens - 1]."""
        pairs, contexts = self._pair_ids(tokens), self._contexts[tokens[:-1]]
        at = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
        counts = np.where(self._pairs[at] == pairs, self._pair_counts[at], 0)
        weights = np.where(contexts > 0, weight, 0.0)
        return weights * counts / np.maximum(contexts, 1) + (1 - weights) * self.unigram(tokens)

    def _pair_ids(self, tokens: Tokens) -> Tokens:
        return tokens[:-1] * self._vocab_size + tokens[1:]


def score_baselines(prepared: PreparedData) -> Baselines:
    """Fit both models on the training split and score the held-out split."""
    train, heldout = (split.read(0, split.num_tokens).numpy() for split in (prepared["train"], prepared["heldout"]))
    if len(train) < 20:
        raise UserError(f"{len(train)} training tokens are too few for the baselines")
    weight = tune_weight(train, prepared.vocab_size)
    model = CountModel(train, prepared.vocab_size)

    def score(probabilities: NDArray[np.float64]) -> BaselineScore:
        nats = -float(np.log(probabilities).mean())
        scored = len(probabilities)
        return BaselineScore(nats, math.exp(nats), bits_per_byte([prepared["heldout"]], nats, scored), scored)

    return Baselines(score(model.unigram(heldout)), score(model.bigram(heldout, weight)), weight)


def tune_weight(train: Tokens, vocab_size: int) -> float:
    """The best w (in hundredths) on the last tenth of these tokens, with counts of the rest."""
    cut = len(train) * 9 // 10
    model, tuning = CountModel(train[:cut], vocab_size), train[cut:]
    weights = np.arange(1, 100) / 100
    nats = [-np.log(model.bigram(tuning, w)).mean() for w in weights]
    return float(weights[int(np.argmin(nats))])
