"""The numbers of a report: losses of each run, their gaps to a baseline, and what seeds alone change."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmstack.reports.runs import Array, Group, Run


@dataclass(frozen=True)
class Gap:
    """How far a loss lies above the baseline's."""

    nats: float
    """Loss - baseline's, nats per token; negative: better."""
    percent: float
    """100 · nats / baseline's."""

    @classmethod
    def between(cls, loss: float | None, baseline: float | None) -> Gap | None:
        """None where either is missing or diverged."""
        if loss is None or baseline is None or not math.isfinite(loss) or not math.isfinite(baseline):
            return None
        return cls(loss - baseline, 100 * (loss - baseline) / baseline)


@dataclass(frozen=True)
class RunNumbers:
    """One row. Losses are in nats per token; None: the run was never validated (or knows no such number)."""

    name: str
    path: str
    norm: str
    seed: int | None
    finished: bool
    steps: int
    """Optimiser steps done."""
    tokens: int | None
    """Tokens trained on."""
    tokens_per_second: float | None
    """Median over the logged steps, all devices together."""
    train_loss: float | None
    """Mean over the last logged steps, as many as the pictures smooth over."""
    final_val_loss: float | None
    """Of the last validation; NaN where the run had diverged."""
    final_gap: Gap | None
    best_val_loss: float | None
    """Lowest of all validations."""
    best_step: int | None
    """After how many steps that was."""
    best_gap: Gap | None
    best_perplexity: float | None
    """exp(best_val_loss)."""
    val_tokens: int | None
    """Tokens of a validation."""


@dataclass(frozen=True)
class Spread:
    """A loss over the seeds of a setting."""

    mean: float
    lowest: float
    highest: float
    range: float
    """highest - lowest."""
    deviation: float | None
    """Sample standard deviation (n - 1); None: one seed."""
    n: int

    @classmethod
    def over(cls, losses: Sequence[float | None]) -> Spread | None:
        """Of those runs that have the loss and have not diverged; None where there is none."""
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        if not known:
            return None
        deviation = statistics.stdev(known) if len(known) > 1 else None
        low, high = min(known), max(known)
        return cls(statistics.fmean(known), low, high, high - low, deviation, len(known))


@dataclass(frozen=True)
class GroupNumbers:
    """One setting over its seeds. Gaps are between means."""

    label: str
    runs: list[str]
    final_val_loss: Spread | None
    final_gap: Gap | None
    best_val_loss: Spread | None
    best_gap: Gap | None


def smoothing_window(rows: int) -> int:
    """Logged steps that a smoothed loss is a mean of: one in fifty, at least 10."""
    return max(rows // 50, 10)


def run_numbers(run: Run, baseline: Run) -> RunNumbers:
    """The row of ``run``; ``baseline`` itself has gaps of 0."""
    _, train = run.points("loss")
    _, speeds = run.points("tokens_per_second")
    steps, losses = run.points("val_loss", over="step")
    final, best = _final(run), _best(run)
    return RunNumbers(
        name=run.name,
        path=str(run.path),
        norm=run.norm,
        seed=run.seed,
        finished=run.finished,
        steps=int(run.metrics["step"][-1]),
        tokens=_whole(run.metrics["tokens_seen"]),
        tokens_per_second=float(np.median(speeds)) if speeds.size else None,
        train_loss=float(train[-smoothing_window(train.size) :].mean()) if train.size else None,
        final_val_loss=final,
        final_gap=Gap.between(final, _final(baseline)),
        best_val_loss=best,
        best_step=int(steps[losses.argmin()]) if losses.size else None,
        best_gap=Gap.between(best, _best(baseline)),
        best_perplexity=_exp(best),
        val_tokens=_whole(run.metrics["val_tokens"]),
    )


def group_numbers(groups: Sequence[Group], baseline: Run) -> list[GroupNumbers]:
    """A row per setting, against the means of the setting that the baseline has."""
    rows = [
        (
            group,
            Spread.over([_final(run) for run in group.runs]),
            Spread.over([_best(run) for run in group.runs]),
        )
        for group in groups
    ]
    _, final_reference, best_reference = next(row for row in rows if baseline in row[0].runs)
    return [
        GroupNumbers(
            label=group.label,
            runs=[run.name for run in group.runs],
            final_val_loss=final,
            final_gap=Gap.between(_mean(final), _mean(final_reference)),
            best_val_loss=best,
            best_gap=Gap.between(_mean(best), _mean(best_reference)),
        )
        for group, final, best in rows
    ]


def digits(value: float, decimals: int, sign: str = "") -> str:
    """``value`` with so many decimals; what is huge (a diverged run) by its magnitude alone."""
    return f"{value:{sign},.{decimals}f}" if abs(value) < 1e6 else f"{value:{sign}.2e}"


def _final(run: Run) -> float | None:
    losses = run.metrics["val_loss"][np.isfinite(run.metrics["val_tokens"])]
    return float(losses[-1]) if losses.size else None


def _best(run: Run) -> float | None:
    _, losses = run.points("val_loss", over="step")
    return float(losses.min()) if losses.size else None


def _exp(loss: float | None) -> float | None:
    """Infinite where a diverged run's is beyond all numbers."""
    return None if loss is None else math.exp(loss) if loss < 700 else math.inf


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def _whole(values: Array) -> int | None:
    known = values[np.isfinite(values)]
    return int(known[-1]) if known.size else None
