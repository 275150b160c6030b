"""One process, DDP and ZeRO 1 to 3 make the same run, whatever is compiled, recomputed or accumulated.

Small models whose sizes two ranks cannot divide, on the copy task, whose samples differ in the number of tokens that
count. The same samples make up a step under every strategy. What CI runs is made at one start of each rank.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, isfinite
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from llmstack.model.norms.registry import METHODS
from tests.training.parity_worker import Job, Precision, Seen, Strategy, make_jobs, read_jobs

pytestmark = pytest.mark.timeout(1500)

MANY_RANKS: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")
Results = dict[Job, list[Seen]]

SOME_NORMS = ("bhyt", "fake_ln", "tapernorm_all")
"""Of each way to live one, for CI: one that looks at the weights, one that measures, one that is calibrated."""
SGD = [*(Job(norm=norm) for norm in SOME_NORMS), Job(norm="bhyt", accumulate=4, tied=False)]
ADAMW = [Job(norm="rmsnorm", optimizer="adamw", accumulate=4), Job(norm="bhyt", optimizer="adamw", tied=False)]

SMALL_GRADIENTS = {"by_layer": 0.01, "dyt": 0.05}
"""Norms at which clipping must begin to have an effect where embedding and head are not tied."""
EVERY_SGD = [
    # So short steps have to be more to move the weights.
    Job(
        norm=norm, accumulate=4, tied=False, clip=SMALL_GRADIENTS.get(norm, 0.1), steps=40 if norm == "by_layer" else 20
    )
    for norm in sorted(METHODS)
]
EVERY_ADAMW = [Job(norm=norm, optimizer="adamw") for norm in sorted(METHODS)]

BF16 = Job(strategy="zero2", norm="bhyt", precision="bf16-mixed", optimizer="adamw", steps=100)
AT_ONCE, ACCUMULATED = replace(BF16, micro_batch_size=16), replace(BF16, micro_batch_size=2, accumulate=8)

COUNTED = [
    Job(strategy, optimizer="adamw", precision="bf16-mixed", steps=1, accumulate=3, micro_batch_size=3, valid_tokens=n)
    for strategy, n in (("zero2", 257), ("zero2", 16_385), ("zero3", 16_385))
]

SAVED = [
    Job(strategy, norm="bhyt", optimizer="adamw", precision=precision, steps=4, save_at=2)
    for strategy, precision in product(MANY_RANKS, get_args(Precision))
]

BROKEN = [
    Job(strategy, norm="bhyt", optimizer="adamw", precision=precision, steps=3, accumulate=2, broken_step=1)
    for strategy, precision in product(MANY_RANKS, get_args(Precision))
]
BROKEN += [
    # In the midst of what they measure.
    Job(strategy, norm=norm, optimizer="adamw", steps=60 if norm == "tapernorm_all" else 3, accumulate=2, broken_step=1)
    for strategy, norm in (("ddp", "tapernorm_all"), ("zero2", "fake_ln"))
]

EVERY_WAY = [
    Job(strategy, norm=norm, activation_checkpointing=setting, compile=compile, steps=3, clip=None)
    for compile, norm, setting, strategy in product(
        (False, True), ("bhyt", "rmsnorm"), ("none", "full", 2, "selective"), ("zero1", "zero2", "zero3")
    )
]
SOME_WAYS = [
    job
    for job in EVERY_WAY
    if job.norm == "bhyt"
    and (
        (job.strategy != "zero1" and not job.compile)
        or (job.compile and (job.strategy, job.activation_checkpointing) in (("zero2", "full"), ("zero3", "selective")))
    )
]


def under_all(*jobs: Job) -> list[Job]:
    return [replace(job, strategy=strategy) for strategy in ("single", *MANY_RANKS) for job in jobs]


def plain(job: Job) -> Job:
    """The same run in one process, neither compiled nor recomputed."""
    return replace(job, strategy="single", compile=False, activation_checkpointing="none")


def loss(seen: Sequence[Seen]) -> Tensor:
    """Of each step: the parts of the ranks together."""
    return torch.tensor([one.losses for one in seen], dtype=torch.float64).sum(0)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what was expected (nothing, where a phase of a norm has no use for a parameter)."""
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / (size or 1.0)


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
    # The gradient of a λ is one sum over all tokens and channels, whose terms nearly cancel: 4e-7 here, 1.04e-6 once.
    assert worst(first.gradients, reference.gradients, of_scalars=True) < (5e-6, "")
    by_hand = torch.stack([gradient.double().norm() for gradient in reference.gradients.values()]).norm()
    assert first.norms[0] == pytest.approx(float(by_hand), rel=1e-6)
    assert len(first.norms) == job.steps
    assert job.clip is not None
    assert min(first.norms) > 1.2 * job.clip, "clipping was meant to bite"
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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of all runs that CI makes; once, also where pytest-xdist gives the tests to several workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "strategies"
    jobs = [*under_all(*SGD, *ADAMW), *COUNTED, *SAVED, *BROKEN, *with_references(SOME_WAYS)]
    with (base / "strategies.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make_jobs(folder, jobs, timeout=1200)
    return read_jobs(folder)


def check_run(job: Job, results: Results) -> None:
    seen, reference = results[job], results[replace(job, strategy="single")]
    if job.optimizer == "sgd":
        check_first_step_and_weights(job, seen, reference[0])
    else:
        torch.testing.assert_close(loss(seen), loss(reference), rtol=1e-4, atol=0)
        assert loss(reference)[-1] < loss(reference)[0] - 0.3
    if job.strategy == "zero3":
        check_shards(seen)


def check_each(check: Callable[[Job, Results], None], jobs: Iterable[Job], results: Results) -> None:
    """Of all that fail, which and how."""
    failed = []
    for job in jobs:
        try:
            check(job, results)
        except AssertionError as error:
            failed.append(f"{job}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("strategy", MANY_RANKS)
def test_gradients_norms_weights_and_losses_are_those_of_one_process(results: Results, strategy: Strategy) -> None:
    check_each(check_run, [replace(job, strategy=strategy) for job in (*SGD, *ADAMW)], results)


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_the_same_with_every_norm(tmp_path: Path) -> None:
    """With SGD accumulated and untied, with AdamW at once and tied."""
    make_jobs(tmp_path, under_all(*EVERY_SGD, *EVERY_ADAMW), timeout=2600)
    results = read_jobs(tmp_path)
    check_each(check_run, [job for job in results if job.strategy != "single"], results)


def last_twenty(seen: Sequence[Seen]) -> float:
    """Mean loss of the last 20 steps."""
    return float(loss(seen)[-20:].mean())


@pytest.mark.full
def test_bf16_accumulated_or_at_once_trains_alike(tmp_path: Path) -> None:
    """8 micro-batches, or one 8 times as large: accumulation in fp32 loses nothing that shows after 100 steps."""
    make_jobs(tmp_path, [AT_ONCE, ACCUMULATED], timeout=600)
    results = read_jobs(tmp_path)
    at_once, accumulated = results[AT_ONCE], results[ACCUMULATED]
    assert last_twenty(at_once) < float(loss(at_once)[0]) - 0.3
    assert loss(accumulated).tolist() != loss(at_once).tolist()
    assert last_twenty(accumulated) == pytest.approx(last_twenty(at_once), rel=3e-3)


@pytest.mark.full
def test_bf16_accumulation_is_within_the_spread_of_summation_orders(tmp_path: Path) -> None:
    """The samples of each step in five orders: the losses of those made at once and of those accumulated overlap.

    Five and five numbers of one distribution lie apart by chance once in 126 times.
    """
    kinds = [[replace(job, order=order) for order in range(5)] for job in (AT_ONCE, ACCUMULATED)]
    make_jobs(tmp_path, [*kinds[0], *kinds[1]], timeout=1300)
    results = read_jobs(tmp_path)
    at_once, accumulated = ([last_twenty(results[job]) for job in jobs] for jobs in kinds)
    assert len({*at_once, *accumulated}) > 5, "another order was meant to round otherwise"
    assert min(at_once) <= max(accumulated), (at_once, accumulated)
    assert min(accumulated) <= max(at_once), (at_once, accumulated)


@pytest.mark.parametrize("job", COUNTED, ids=lambda job: f"{job.strategy}-{job.valid_tokens}")
def test_the_normaliser_is_exact_in_bf16(results: Results, job: Job) -> None:
    """257 and 16,385 are no bf16 numbers: a loss divided by 256 or 16,384 would be off by 30 times the tolerance."""
    seen = results[job]
    assert all(one.normalisers == [("torch.int64", job.valid_tokens)] * job.accumulate for one in seen)
    assert sum(one.own_tokens[0] for one in seen) == job.valid_tokens
    by_hand = torch.tensor([one.recomputed_losses for one in seen], dtype=torch.float64).sum(0)
    torch.testing.assert_close(loss(seen), by_hand, rtol=2e-6, atol=0)


def with_references(jobs: Sequence[Job]) -> list[Job]:
    return [*dict.fromkeys(map(plain, jobs)), *jobs]


def check_way(job: Job, results: Results) -> None:
    seen, reference = results[job], results[plain(job)]
    assert len(seen[0].losses) == 3
    kinds = {"none": ["nothing"] * 2, "full": ["all"] * 2, 2: ["all", "nothing"], "selective": ["cheap"] * 2}
    expected = kinds[job.activation_checkpointing]
    assert seen[0].recompute == expected
    # One of the loss and one of each kind of block.
    assert seen[0].graphs == (1 + len(set(expected)) if job.compile else 0)
    torch.testing.assert_close(loss(seen), loss(reference), rtol=1e-5, atol=0)
    assert worst(seen[0].gradients, reference[0].gradients) < (1e-5, "")
    assert worst(seen[0].final, reference[0].final) < (1e-5, "")


@pytest.mark.parametrize(
    "job", SOME_WAYS, ids=lambda job: f"{job.strategy}-{'compiled' * job.compile}-{job.activation_checkpointing}"
)
def test_compiled_and_recomputed_is_plain(results: Results, job: Job) -> None:
    check_way(job, results)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_stage_compiled_or_not_recomputed_or_not_is_plain(tmp_path: Path) -> None:
    make_jobs(tmp_path, with_references(EVERY_WAY), timeout=3300)
    check_each(check_way, EVERY_WAY, read_jobs(tmp_path))


@pytest.mark.parametrize("job", SAVED, ids=lambda job: f"{job.strategy}-{job.precision}")
def test_what_is_saved_is_restored(results: Results, job: Job) -> None:
    check_saved(results[job])


def check_saved(seen: Sequence[Seen]) -> None:
    """Weights, statistics and optimiser state come back bit for bit, and with them the steps that follow."""
    weights, states = (merged([one.saved[kind] for one in seen]) for kind in (0, 1))
    assert equal(merged([one.restored[0] for one in seen]), weights)
    assert equal(merged([one.restored[1] for one in seen]), states)
    assert equal(seen[0].final_again, seen[0].final)
    parameters = seen[0].gradients.keys()
    assert weights.keys() == seen[0].final.keys()
    assert states.keys() == {f"{name}/{kind}" for name in parameters for kind in ("exp_avg", "exp_avg_sq", "step")}
    assert all(float(states[f"{name}/step"]) == 2 for name in parameters)
    assert all(states[f"{name}/{kind}"].any() for name in parameters for kind in ("exp_avg", "exp_avg_sq"))
    # The fp32 masters, not what was computed with.
    assert any(not torch.equal(weights[name].bfloat16().float(), weights[name]) for name in parameters)


def check_broken(job: Job, seen: Sequence[Seen]) -> None:
    """The step left no trace on any rank, and nothing of it came into those that followed."""
    for one in seen:
        before, after = one.around_broken_step
        assert any(name.endswith("/exp_avg") for name in before)
        assert equal(after, before)
        assert len(one.norms) == job.steps
        assert all(map(isfinite, one.norms))
        assert len(one.own_tokens) == job.steps + 1
        assert worst(one.final, {name: after[name] for name in one.final})[0] > 1e-3


@pytest.mark.parametrize("job", BROKEN, ids=lambda job: f"{job.strategy}-{job.norm}-{job.precision}")
def test_a_step_that_is_not_finite_on_one_rank_leaves_no_trace(results: Results, job: Job) -> None:
    check_broken(job, results[job])


@pytest.mark.full
def test_offload_to_the_host_trains_saves_and_skips_as_without(tmp_path: Path) -> None:
    """DeepSpeed's CPU Adam is compiled at its first use, which takes minutes."""
    kept, broken = ([job for job in jobs if job.strategy in ("zero2", "zero3")] for jobs in (SAVED, BROKEN))
    offloaded, broken = ([replace(job, strategy=f"{job.strategy}_offload") for job in jobs] for jobs in (kept, broken))
    make_jobs(tmp_path, [*kept, *offloaded, *broken], timeout=1300)
    results = read_jobs(tmp_path)
    for ours, theirs in zip(offloaded, kept, strict=True):
        torch.testing.assert_close(loss(results[ours]), loss(results[theirs]), rtol=1e-4, atol=0)
        assert loss(results[theirs])[-1] < loss(results[theirs])[0]
        check_saved(results[ours])
    for job in broken:
        check_broken(job, results[job])
