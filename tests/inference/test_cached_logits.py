"""Logits: of a full pass, of a prompt read by pieces, and of one token at a time, for every norm and kind of position.

The tokens of a generator follow from these; near-ties and argmax hide small mistakes in them.
"""

from __future__ import annotations

import functools
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.inference import Generator
from llmstack.inference.reading import decode_rows, read_texts
from llmstack.inference.runner import CachedRunner, Runner, UncachedRunner
from llmstack.model import KVCache, Llama, ModelConfig
from llmstack.model.norms import METHODS
from llmstack.training.probe import probe
from llmstack.training.step import micro_batch_loss

VOCAB, STEPS, LENGTH, PROMPT = 61, 30, 30, 20
FAKE = {"start_mlp": 2, "start_qk": 4, "start_v": 6, "start_final": 8, "gap_mlp": 1, "gap_qk": 1, "gap_v": 1}
TAPER = {"taper_start": 0.1, "taper_end": 0.5}
NORMS: dict[str, dict[str, Any]] = {name: {"method": name} for name in sorted(METHODS)} | {
    "fake_ln": {"method": "fake_ln", **FAKE},
    "fake_ln of rmsnorm": {"method": "fake_ln", "kind": "rmsnorm", **FAKE},
    "fake_ln with a first token": {"method": "fake_ln", "first_token": True, "start_merge": 20, **FAKE},
    **{name: {"method": name, **TAPER} for name in sorted(METHODS) if name.startswith("taper")},
    "bhyt of many kinds": {"method": "bhyt", "exact_layers": "1", "kappa_schedule": "sqrt", "lambda_final": 3.0},
    "bhyt_star with mean": {"method": "bhyt_star", "mu_term": True},
    "by_layer": {
        "method": "by_layer",
        "layers": {"0": {"method": "tapernorm_internal", **TAPER}},
        "otherwise": {"method": "lns"},
    },
}
REFUSING = {"fake_ln with a first token"}
"""What cannot decode for a part of its training; nothing else refuses at any time."""
IDS = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(2))
ROWS = torch.arange(3)
CHUNKS = (1, 3, 7, PROMPT)


def build(norm: dict[str, Any], **options: Any) -> Llama:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    return Llama(ModelConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes, **options, norm=norm))


def train(model: Llama, last: int = STEPS) -> Llama:
    """A few steps that move the gains far, to the end of what the norms do in a training; ``last``: stop there."""
    method, rows = model.config.norm_method, IDS[:, :17]
    batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "valid_tokens": rows[:, 1:].numel()}
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
    return train(build(NORMS[norm], **options))


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def deviation(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def by_pieces(runner: Runner, chunk: int) -> Tensor:
    """Logits of all of ``IDS``: the prompt ``chunk`` tokens at a time, then single ones."""
    starts = range(0, PROMPT, chunk)
    pieces = [IDS[:, start : min(start + chunk, PROMPT)] for start in starts]
    found = [runner.head(runner.extend(piece, start, ROWS)) for start, piece in zip(starts, pieces, strict=True)]
    for place in range(PROMPT, LENGTH):
        found.append(decode_rows(runner, {row: (place, [int(IDS[row, place])]) for row in range(3)}, 1))
    return torch.cat(found, 1)


def cached(model: Llama, dtype: torch.dtype = torch.float32) -> CachedRunner:
    """With more positions than are read, all NaN-free and empty."""
    return CachedRunner(model, 3, LENGTH + 5, dtype, compile=False)


@torch.no_grad()
def in_full(model: Llama) -> Tensor:
    return model(IDS)


@pytest.mark.parametrize("norm", NORMS)
def test_prompts_by_pieces_and_single_tokens_give_the_logits_of_a_full_pass(norm: str) -> None:
    model = trained(norm)
    expected = in_full(model)
    for chunk in CHUNKS:
        assert distance(by_pieces(cached(model), chunk), expected) < 1e-4
    assert distance(by_pieces(UncachedRunner(model, 3, LENGTH), 7), expected) < 1e-4


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("norm", ["rmsnorm", "bhyt_star with mean", "dyt"])
def test_every_kind_of_position_is_counted_from_the_start_of_the_text(norm: str, positions: str) -> None:
    model = trained(norm, positions=positions)
    expected = in_full(model)
    for chunk in CHUNKS:
        assert distance(by_pieces(cached(model), chunk), expected) < 1e-4


@pytest.mark.parametrize("norm", NORMS)
def test_only_norms_that_treat_the_first_token_apart_refuse_to_decode_and_only_while_they_do(norm: str) -> None:
    """At step 12 all sites of FakeLN have a scale, and the first token has one of its own until step 20."""
    Generator(build(NORMS[norm]).eval(), 16)
    halfway = train(build(NORMS[norm]), 12)
    if norm in REFUSING:
        with pytest.raises(UserError, match="first token of a sequence still has a scale of its own"):
            Generator(halfway, 16)
    else:
        Generator(halfway, 16)
    Generator(trained(norm), 16)


@pytest.mark.parametrize("kind", ["cached", "uncached"])
@pytest.mark.parametrize("norm", ["rmsnorm", "bhyt", "bhyt_star with mean", "fake_ln", "deep_norm"])
def test_rows_of_unequal_length_have_the_logits_of_their_own_texts(norm: str, kind: str) -> None:
    """Texts of 17, 2 and 9 tokens in rows 0, 2 and 3 of five; then rows go on by 1, 3 or no tokens at a time."""
    model = trained(norm)
    expected = in_full(model)
    rows, lengths = [0, 2, 3], [17, 2, 9]
    for chunk in (1, 3, 7, 512):
        runner: Runner = UncachedRunner(model, 5, LENGTH + 1)
        if kind == "cached":
            runner = CachedRunner(model, 5, LENGTH + 1, torch.float32, compile=False)
        texts = [IDS[index, :length].tolist() for index, length in enumerate(lengths)]
        found = read_texts(runner, rows, texts, 0, chunk)
        wanted = torch.stack([expected[index, length - 1] for index, length in enumerate(lengths)])
        assert distance(found, wanted) < 1e-4
        read = list(lengths)
        for widths in [(1, 3, 0), (3, 2, 1), (0, 1, 3), (1, 1, 1)] * 2:
            fed = {
                rows[index]: (read[index], IDS[index, read[index] : read[index] + width].tolist())
                for index, width in enumerate(widths)
                if width
            }
            logits = decode_rows(runner, fed, 3)
            for index, width in enumerate(widths):
                place = slice(read[index], read[index] + width)
                if width:
                    assert distance(logits[rows[index], :width], expected[index, place]) < 1e-4
                read[index] += width


def test_a_copied_row_goes_on_as_the_row_that_read_the_text() -> None:
    model = trained("rmsnorm")
    expected = in_full(model)
    for runner in (cached(model), UncachedRunner(model, 3, LENGTH + 1)):
        read_texts(runner, [1], [IDS[1, :12].tolist()], 0, 5)
        runner.copy_row(1, 2, 11)
        found = read_texts(runner, [2], [IDS[1, :14].tolist()], 11, 2)
        assert distance(found[0], expected[1, 13]) < 1e-4
        found = decode_rows(runner, {1: (12, [int(IDS[1, 12])])}, 1)[1, 0]
        assert distance(found, expected[1, 12]) < 1e-4


@pytest.mark.parametrize("norm", ["rmsnorm", "bhyt", "bhyt_star with mean", "layernorm"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_int8_cache_costs_what_its_rounding_may_cost(norm: str, chunk: int) -> None:
    """A number is off by 1/sqrt(12) of a step, 1/440 of the largest of its 8: a vector by 0.4 % of its length.

    Values change by that at once. Scores are |q||k|/sqrt(8) at most, up to 7 here, and off by 0.4 % of it in a random
    direction: 7 · 0.4 % / sqrt(8) = 1 %, and their weights by as much. That is 1.1 % a layer and 1.5 % for two.
    """
    model = trained(norm)
    expected, runner = in_full(model), cached(model, torch.int8)
    off = deviation(by_pieces(runner, chunk), expected)
    assert 1e-5 < off < 0.015, "more than fp32 rounding: int8 is really used"
    assert {buffer.dtype for name, buffer in runner.cache.named_buffers() if "data" in name} == {torch.int8}


def test_what_an_int8_cache_gives_back_is_off_by_half_a_step_of_its_own_vector_at_most() -> None:
    torch.manual_seed(0)
    cache = KVCache(build(NORMS["rmsnorm"]).config, 3, 10, torch.int8)
    written = torch.randn(3, 2, 10, 8) * torch.logspace(-6, 6, 10)[:, None]
    written[0, 0, 0] = 0
    positions = torch.arange(10).expand(3, 10)
    for found in cache.layer(0).update(written, written, positions):
        half = written.abs().amax(-1, keepdim=True) / 254
        assert ((found - written).abs() <= half * 1.0001).all()
        assert (found[0, 0, 0] == 0).all()


@pytest.mark.parametrize("norm", ["rmsnorm", "bhyt", "layernorm", "tapernorm_all"])
def test_in_bf16_pieces_cost_no_more_than_bf16_itself(norm: str) -> None:
    """Against the exact logits of the same bf16 weights: those of fp32 arithmetic."""
    low = deepcopy(trained(norm)).to(torch.bfloat16)
    exact, limit = in_full(deepcopy(low).float()), 5e-3
    limit = 1.5 * max(deviation(in_full(low), exact), limit)
    for chunk in CHUNKS:
        assert deviation(by_pieces(cached(low, torch.bfloat16), chunk), exact) < limit


def test_a_bf16_cache_of_an_fp32_model_costs_its_rounding() -> None:
    """2^-9 of each number at most: of values at once, and 7 · 2^-9 / sqrt(8) of scores: 0.6 % a layer."""
    model = trained("rmsnorm")
    off = deviation(by_pieces(cached(model, torch.bfloat16), 7), in_full(model))
    assert 1e-5 < off < 0.012
