"""One process, DDP and ZeRO 1 to 3 make the same run, whatever is compiled, recomputed or accumulated.

Small models whose sizes two ranks cannot divide, on the copy task, whose samples differ in the number of tokens that
count. The same samples make up a step under every strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from llmstack.model.norms.registry import METHODS
from tests.training.parity_worker import Job, Precision, Seen, Strategy, run_jobs

MANY_RANKS: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")
Results = dict[Job, list[Seen]]


def under_all(*jobs: Job) -> list[Job]:
    return [replace(job, strategy=strategy) for strategy in ("single", *MANY_RANKS) for job in jobs]


def alone(job: Job) -> Job:
    """The same run, plainly, in one process."""
    return replace(job, strategy="single", compile=False, activation_checkpointing="none")


def loss(seen: Sequence[Seen]) -> Tensor:
    """Of each step: the parts of the ranks together."""
    return torch.tensor([one.losses for one in seen], dtype=torch.float64).sum(0)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def worst(found: dict[str, Tensor], expected: dict[str, Tensor], of_scalars: bool = False) -> tuple[float, str]:
    """The largest error of any tensor (of those with one element, or of the others), and whose it is."""
    assert found.keys() == expected.keys()
    names = [name for name in expected if (expected[name].numel() == 1) == of_scalars]
    return max(((error(found[name], expected[name]), name) for name in names), default=(0.0, ""))


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def merged(shares: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks have between them; nobody has what another has."""
    whole = {name: tensor for share in shares for name, tensor in share.items()}
    assert len(whole) == sum(map(len, shares))
    return whole


def check_first_step_and_weights(job: Job, seen: list[Seen], reference: Seen) -> None:
    """What a strategy must not change, of a run with SGD and clipping."""
    first = seen[0]
    assert all(one.own_tokens != first.own_tokens for one in seen[1:]), "the ranks were meant to differ in tokens"
    assert equal(first.initial, reference.initial)
    assert worst(first.gradients, reference.gradients) < (1e-6, "")
    # The gradient of a λ is one sum over all tokens and channels, whose terms nearly cancel.
    assert worst(first.gradients, reference.gradients, of_scalars=True) < (5e-6, "")
    by_hand = torch.stack([gradient.double().norm() for gradient in reference.gradients.values()]).norm()
    assert first.norms[0] == pytest.approx(float(by_hand), rel=1e-6)
    assert len(first.norms) == job.steps
    assert job.clip is not None
    assert min(first.norms) > 2 * job.clip, "clipping was meant to bite"
    assert worst(first.final, reference.final) < (1e-5, "")
    assert worst(first.final, reference.final, of_scalars=True) < (1e-5, "")
    assert worst(first.final, first.initial)[0] > 0.1, "the weights were meant to move"
    assert all(equal(one.final, first.final) for one in seen[1:])
    torch.testing.assert_close(loss(seen), loss([reference]), rtol=1e-5, atol=0)


def check_shards(seen: list[Seen]) -> None:
    """Under ZeRO-3 each rank holds its part of every parameter, rounded up, and no parameter is left whole."""
    for one in seen:
        assert {name for name, tensor in one.initial.items() if tensor.dim() == 2} <= one.shards.keys()
        for name, (whole, shard, parameter) in one.shards.items():
            assert whole == one.initial[name].numel()
            assert shard == ceil(whole / len(seen)), name
            assert parameter == 0, name


SGD = [*(Job(norm=norm) for norm in sorted(METHODS)), Job(norm="bhyt", accumulate=4, tied=False)]
ALL_SGD = [
    Job(norm=norm, accumulate=accumulate, tied=tied)
    for norm, accumulate, tied in product(sorted(METHODS), (1, 4), (True, False))
]
ADAMW = [
    Job(norm="bhyt", optimizer="adamw", tied=False),
    Job(norm="rmsnorm", optimizer="adamw", accumulate=4),
]
ALL_ADAMW = [replace(job, optimizer="adamw") for job in ALL_SGD]


def check_all(results: Results, strategy: Strategy, jobs: Sequence[Job]) -> None:
    for job in jobs:
        seen, reference = results[replace(job, strategy=strategy)], results[job]
        if job.optimizer == "sgd":
            check_first_step_and_weights(job, seen, reference[0])
        else:
            torch.testing.assert_close(loss(seen), loss(reference), rtol=1e-4, atol=0)
            assert loss(reference)[-1] < loss(reference)[0] - 0.3
        if strategy == "zero3":
            check_shards(seen)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_jobs(tmp_path_factory.mktemp("parity"), under_all(*SGD, *ADAMW))


@pytest.mark.parametrize("strategy", MANY_RANKS)
def test_gradients_norms_weights_and_losses_are_those_of_one_process(results: Results, strategy: Strategy) -> None:
    check_all(results, strategy, [*SGD, *ADAMW])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_same_with_every_norm_accumulated_or_not_tied_or_not(tmp_path: Path) -> None:
    results = run_jobs(tmp_path, under_all(*ALL_SGD, *ALL_ADAMW), timeout=1500)
    for strategy in MANY_RANKS:
        check_all(results, strategy, [*ALL_SGD, *ALL_ADAMW])


BF16 = Job(strategy="zero2", norm="bhyt", precision="bf16-mixed", optimizer="adamw", steps=100, tied=False)
GLOBAL_BATCH = {
    accumulate: replace(BF16, accumulate=accumulate, micro_batch_size=16 // accumulate) for accumulate in (1, 8)
}


def last_twenty(seen: Sequence[Seen]) -> float:
    """Mean loss of the last 20 steps."""
    return float(loss(seen)[-20:].mean())


def test_bf16_accumulated_or_at_once_trains_alike(tmp_path: Path) -> None:
    """8 micro-batches, or one 8 times as large: fp32 accumulation loses nothing that shows after 100 steps."""
    results = run_jobs(tmp_path, list(GLOBAL_BATCH.values()))
    at_once, accumulated = (results[GLOBAL_BATCH[accumulate]] for accumulate in (1, 8))
    assert loss(accumulated)[0] == pytest.approx(float(loss(at_once)[0]), rel=1e-3)
    assert loss(accumulated).tolist() != loss(at_once).tolist()
    assert last_twenty(at_once) < float(loss(at_once)[0]) - 0.3
    assert last_twenty(accumulated) == pytest.approx(last_twenty(at_once), rel=3e-3)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_bf16_accumulation_is_within_the_spread_of_summation_orders(tmp_path: Path) -> None:
    """The samples of each step in five orders: the losses at once and those accumulated overlap.

    Five and five numbers of one distribution lie apart by chance once in 126 times.
    """
    orders = {key: [replace(job, order=order) for order in range(5)] for key, job in GLOBAL_BATCH.items()}
    results = run_jobs(tmp_path, [*orders[1], *orders[8]], timeout=1500)
    at_once, accumulated = ([last_twenty(results[job]) for job in orders[key]] for key in (1, 8))
    assert max(at_once) > min(at_once)
    assert max(min(at_once), min(accumulated)) < min(max(at_once), max(accumulated)), (at_once, accumulated)


def test_the_normaliser_is_exact_in_bf16(tmp_path: Path) -> None:
    """257 and 16,385 valid tokens, which bf16 does not know: a loss divided by 256 or 16,384 would be off by more."""
    common = Job(optimizer="adamw", steps=2, precision="bf16-mixed", accumulate=3, micro_batch_size=3)
    jobs = [
        replace(common, strategy=strategy, valid_tokens=count)
        for strategy, count in product(("zero1", "zero2", "zero3"), (257, 16_385))
    ]
    results = run_jobs(tmp_path, jobs)
    for job, seen in results.items():
        assert all(one.normalisers == [("torch.int64", job.valid_tokens)] * 6 for one in seen)
        assert [sum(tokens) for tokens in zip(*(one.own_tokens for one in seen), strict=True)] == [job.valid_tokens] * 2
        expected = torch.tensor([one.recomputed_losses for one in seen], dtype=torch.float64).sum(0)
        torch.testing.assert_close(loss(seen), expected, rtol=2e-6, atol=0)


SHORT = Job(steps=3, clip=None)
COMBINATIONS = [
    replace(SHORT, strategy=strategy, norm=norm, activation_checkpointing=setting, compile=compiled)
    for compiled, norm, setting, strategy in product(
        (False, True), ("bhyt", "rmsnorm"), ("none", "full", 2, "selective"), ("zero1", "zero2", "zero3")
    )
]
QUICK = [
    *(job for job in COMBINATIONS if job.norm == "bhyt" and not job.compile and job.strategy != "zero1"),
    *(
        replace(SHORT, strategy="zero3", norm="bhyt", activation_checkpointing=setting, compile=True)
        for setting in ("none", "selective")
    ),
]


def check_compiled_and_recomputed(folder: Path, jobs: Sequence[Job], timeout: float) -> None:
    results = run_jobs(folder, [*{alone(job) for job in jobs}, *jobs], timeout=timeout)
    for job in jobs:
        seen, reference = results[job], results[alone(job)]
        assert len(seen[0].losses) == 3
        torch.testing.assert_close(
            loss(seen), loss(reference), rtol=1e-5, atol=0, msg=lambda text, job=job: f"{job}: {text}"
        )
        assert worst(seen[0].gradients, reference[0].gradients) < (1e-5, "")


@pytest.mark.timeout(900)
def test_sharded_compiled_and_recomputed_is_plain(tmp_path: Path) -> None:
    check_compiled_and_recomputed(tmp_path, QUICK, timeout=800)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_stage_compiled_or_not_recomputed_or_not_is_plain(tmp_path: Path) -> None:
    check_compiled_and_recomputed(tmp_path, COMBINATIONS, timeout=3300)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_offload_to_the_host_trains_as_zero3(tmp_path: Path) -> None:
    """DeepSpeed's CPU Adam is compiled at its first use, which takes minutes."""
    jobs = [
        Job(strategy=strategy, norm="bhyt", optimizer="adamw", steps=3, precision=precision)
        for strategy, precision in product(("zero3", "zero3_offload"), get_args(Precision))
    ]
    results = run_jobs(tmp_path, jobs, timeout=1500)
    for job in jobs[:2]:
        plain, offloaded = results[job], results[replace(job, strategy="zero3_offload")]
        tolerance = 1e-4 if job.precision == "32-true" else 1e-3
        torch.testing.assert_close(loss(offloaded), loss(plain), rtol=tolerance, atol=0)
        assert loss(plain)[2] < loss(plain)[0]


def test_what_is_saved_is_restored(tmp_path: Path) -> None:
    """Weights, statistics and optimiser state at each stage, bit for bit, and the steps that follow."""
    jobs = [
        Job(strategy=strategy, norm="bhyt", optimizer="adamw", precision=precision, steps=4, save_at=2)
        for strategy, precision in product(MANY_RANKS, get_args(Precision))
    ]
    for job, seen in run_jobs(tmp_path, jobs).items():
        weights, states = (merged([one.saved[kind] for one in seen]) for kind in (0, 1))
        assert equal(merged([one.restored[0] for one in seen]), weights), job
        assert equal(merged([one.restored[1] for one in seen]), states), job
        assert equal(seen[0].final_again, seen[0].final), job
        parameters = seen[0].gradients.keys()
        assert weights.keys() == seen[0].final.keys()
        assert states.keys() == {f"{name}/{kind}" for name in parameters for kind in ("exp_avg", "exp_avg_sq", "step")}
        assert all(float(states[f"{name}/step"]) == 2 for name in parameters)
        assert all(states[f"{name}/{kind}"].any() for name in parameters for kind in ("exp_avg", "exp_avg_sq"))
        # The fp32 masters, not what was computed with.
        assert any(not torch.equal(weights[name].bfloat16().float(), weights[name]) for name in parameters)
