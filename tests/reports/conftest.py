"""Run folders made by hand, with known numbers in them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmstack.checkpoint import DiagnosticsRow, MetricsRow, RunFolder

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, runs_in: Callable[[Path], MakeRun]) -> MakeRun:
    """``make_run(name, validations={step: loss})`` -> the folder of a run of 100 tokens a step."""
    return runs_in(tmp_path / "runs")


@pytest.fixture(scope="session")
def runs_in() -> Callable[[Path], MakeRun]:
    """The same for any folder of runs."""
    return lambda folder: partial(_make_run, folder)


def _make_run(
    folder: Path,
    name: str,
    validations: dict[int, float],
    *,
    norm: str = "rmsnorm",
    seed: int = 0,
    steps: int = 40,
    val_tokens: int = 5000,
    diagnostics: Sequence[DiagnosticsRow] = (),
    **more: Any,
) -> Path:
    run = RunFolder(folder / name)
    run.path.mkdir(parents=True)
    model = {"config": {"norm": {"method": norm}}, "seed": seed}
    config = {"seed_everything": seed, "model": model, "data": {"seed": seed}, **more}
    run.config_path.write_text(yaml.safe_dump(config))
    for step in range(1, steps + 1):
        loss = validations.get(step)
        run.metrics.append(
            MetricsRow(
                step=step,
                tokens_seen=100 * step,
                loss=4.0 if step <= steps - 10 else 3.0,
                learning_rate=1e-3,
                grad_norm=1.0,
                tokens_per_second=1000.0 + step,
                val_loss=loss,
                val_tokens=None if loss is None else val_tokens,
            )
        )
    if diagnostics:
        run.diagnostics.append(list(diagnostics))
    return run.path
