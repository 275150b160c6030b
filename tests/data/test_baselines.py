"""The counting models are what their formulas say, and are scored on what evaluation blocks score."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from llmstack.data import PackedBlocks, PreparedData, score_baselines
from llmstack.data.baselines import CountModel, tune_weight
from llmstack.data.prepared import PreparedSplit


def zipf_tokens(length: int, vocab_size: int, seed: int) -> np.ndarray:
    """A stream with bigram structure: every other token is a function of the one before."""
    generator = np.random.default_rng(seed)
    tokens = np.minimum(generator.zipf(1.3, length) - 1, vocab_size - 1)
    tokens[1::2] = (tokens[0::2][: len(tokens[1::2])] * 7 + 1) % vocab_size
    return tokens.astype(np.int64)


def test_probabilities_are_the_formula() -> None:
    """Against counting in dictionaries; contexts and pairs never seen included."""
    vocab, weight = 30, 0.7
    train, text = zipf_tokens(400, vocab, 0).tolist(), [29, 28, *range(30), *zipf_tokens(100, vocab, 1).tolist()]
    singles, pairs, contexts = Counter(train), Counter(pairwise(train)), Counter(train[:-1])
    assert 0 in [contexts[t] for t in text]
    expected = []
    for s, t in pairwise(text):
        unigram = (singles[t] + 1) / (len(train) + vocab)
        bigram = weight * pairs[s, t] / contexts[s] + (1 - weight) * unigram if contexts[s] else unigram
        expected.append(bigram)
    model = CountModel(np.array(train), vocab)
    assert model.bigram(np.array(text), weight) == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    vocab = 30
    model = CountModel(zipf_tokens(400, vocab, 0), vocab)
    for context in range(vocab):
        total = sum(model.bigram(np.array([context, t]), 0.6)[0] for t in range(vocab))
        assert total == pytest.approx(1, abs=1e-12)


def test_weight_is_the_best_on_the_last_tenth() -> None:
    train = zipf_tokens(5000, 50, 2)
    model, tuning = CountModel(train[:4500], 50), train[4500:]
    losses = {w / 100: -np.log(model.bigram(tuning, w / 100)).mean() for w in range(1, 100)}
    assert tune_weight(train, 50) == pytest.approx(min(losses, key=losses.__getitem__))


class Memory(PreparedSplit):
    def __init__(self, tokens: np.ndarray, num_bytes: int) -> None:
        self.num_tokens, self.num_bytes, self._tokens = len(tokens), num_bytes, torch.from_numpy(tokens)

    def read(self, start: int, length: int) -> torch.Tensor:
        return self._tokens[start : start + length]


class InMemory(PreparedData):
    def __init__(self, train: np.ndarray, heldout: np.ndarray, vocab_size: int) -> None:
        self._splits = {"train": Memory(train, 1), "heldout": Memory(heldout, 3 * len(heldout))}
        self.vocab_size = vocab_size


def test_heldout_text_does_not_touch_the_models() -> None:
    train = zipf_tokens(2000, 40, 3)
    results = [score_baselines(InMemory(train, zipf_tokens(300, 40, seed), 40)) for seed in (4, 5)]
    assert results[0].bigram_weight == results[1].bigram_weight == tune_weight(train, 40)
    assert results[0].bigram != results[1].bigram


def test_scores_are_consistent() -> None:
    train, heldout = zipf_tokens(2000, 40, 3), zipf_tokens(300, 40, 4)
    result = score_baselines(InMemory(train, heldout, 40))
    counts = Counter(train.tolist())
    nats = -np.mean([math.log((counts[t] + 1) / 2040) for t in heldout.tolist()[1:]])
    assert result.unigram.nats_per_token == pytest.approx(nats, rel=1e-12)
    assert result.unigram.perplexity == pytest.approx(math.exp(nats))
    assert result.unigram.bits_per_byte == pytest.approx(nats * 299 / math.log(2) / 900)


def test_baselines_of_the_embedded_corpus(embedded: PreparedData) -> None:
    """Bigram below unigram below uniform, on the tokens that evaluation blocks score."""
    result = score_baselines(embedded)
    blocks: Any = PackedBlocks(embedded, "heldout", 128, keep_last=True)
    assert result.unigram.num_tokens == result.bigram.num_tokens == blocks.valid_tokens(np.arange(len(blocks))).sum()
    assert result.bigram.nats_per_token < result.unigram.nats_per_token < math.log(embedded.vocab_size)
    assert 0 < result.bigram_weight < 1
