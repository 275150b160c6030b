"""A run of several processes, as a user starts it: one command, which starts its further ranks itself."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from llmstack.checkpoint import MetricsFile, RunFolder, read_checkpoint
from llmstack.cli.main import main
from tests.e2e.conftest import environment

ROOT = Path(__file__).resolve().parents[2]

TINY = [
    *("-c", "model/tiny.yaml", "-c", "norm/bhyt.yaml", "-c", "data/copy.yaml"),
    *("--model.config.hidden_size", "64", "--model.config.intermediate_size", "96", "--model.config.num_layers", "2"),
    *("--model.compile", "false", "--run.compare_ranks_every", "1"),
]
"""A run of seconds. Unless another is given, its batch is of 4 samples."""

LAYOUTS = {
    "single": [*("-c", "trainer/cpu.yaml", "--data.micro_batch_size", "2", "--trainer.accumulate_grad_batches", "2")],
    **{
        f"{strategy} on {ranks}": [
            *("-c", f"trainer/{strategy}.yaml", "--trainer.devices", str(ranks), "--trainer.precision", "32-true"),
            *("--data.micro_batch_size", str(4 // ranks // accumulate)),
            *("--trainer.accumulate_grad_batches", str(accumulate)),
        ]
        for strategy, ranks, accumulate in (
            ("ddp", 2, 1),
            ("zero1", 1, 1),
            ("zero2", 2, 1),
            ("zero3", 2, 2),
        )
    },
}
"""Where and how a run may compute: always the same 4 samples a step."""

EXACT = ("step", "tokens_seen", "loss", "learning_rate", "grad_norm", "val_loss", "val_perplexity", "val_tokens")
"""Columns of metrics.csv that are the same in a run that was interrupted."""


class Job:
    """A ``fit`` that has been started; use it in a ``with`` block, after which nothing of it is left."""

    def __init__(
        self, run: Path, *arguments: str, base: Sequence[str] = TINY, output: Path | None = None, **variables: str
    ) -> None:
        self.run = run
        command = [sys.executable, "-m", "llmstack", "fit", *base, *arguments, "--run.dir", str(run)]
        self._output = (output or run.parent) / f"{run.name}-output-{time.monotonic_ns()}"
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=run.parent,
                env={**environment(), "PYTHONPATH": str(ROOT), **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *reason: Any) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the job and all that they have started, as a scheduler does."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(folder.name)) == self.process.pid:
                    os.kill(int(folder.name), signal.SIGKILL)
        self.process.wait(timeout=30)

    @property
    def output(self) -> str:
        """What all ranks have printed, on stdout or stderr."""
        return self._output.read_text()

    def said(self, words: str) -> list[str]:
        """The lines with these words in them."""
        return [line for line in self.output.splitlines() if words in line]

    def processes(self) -> dict[int, int]:
        """The living processes of the run by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if os.fsencode(self.run) in words and b"fit" in words:
                rank = next((value[11:] for value in variables if value.startswith(b"LOCAL_RANK=")), b"0")
                found[int(rank)] = int(folder.name)
        return found

    def wait_until_at(self, step: int, timeout: float = 240) -> None:
        """Return when metrics.csv has the row of ``step``."""
        self.wait_for(lambda: bool((rows := rows_of(self.run)) and rows[-1]["step"] >= step), timeout)

    def wait_for(self, condition: Any, timeout: float = 240) -> None:
        """Return when it is true; the run must go on meanwhile."""
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until, f"it did not come to that:\n{self.output}"
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def end(self, timeout: float = 300) -> int:
        """Exit status of the command, as a shell gives it, and no process of the run is left."""
        until = time.monotonic() + timeout
        try:
            status = self.process.wait(timeout)
            while self.processes():
                assert time.monotonic() < until, f"orphans: {self.processes()}\n{self.output}"
                time.sleep(0.1)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"not ended in {timeout} s:\n{self.output}") from error
        return status if status >= 0 else 128 - status


def finished(run: Path, *arguments: str, timeout: float = 300, **options: Any) -> Job:
    """A run that has ended well."""
    with Job(run, *arguments, **options) as job:
        assert job.end(timeout) == 0, job.output
    return job


def fit_here(run: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and stderr of a run of one process, made in this one, where all is loaded already."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(["fit", *TINY, *arguments, "--run.dir", str(run)])
    return status, errors.getvalue()


def callbacks(folder: Path, **which: dict[str, Any]) -> list[str]:
    """Arguments that add callbacks of ``tests.training.faults``, each with its options."""
    path = folder / f"callbacks-{'-'.join(which)}.yaml"
    entries = [{"class_path": f"tests.training.faults.{name}", "init_args": options} for name, options in which.items()]
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": entries}}))
    return ["-c", str(path)]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """metrics.csv so far."""
    path = run / "metrics.csv"
    return MetricsFile(path).read() if path.is_file() and path.stat().st_size else []


def exact_rows(run: Path) -> list[list[float | None]]:
    """Its columns that no clock has part in."""
    return [[row[column] for column in EXACT] for row in rows_of(run)]


def newest(run: Path) -> Any:
    """The newest checkpoint, which must be whole."""
    return read_checkpoint(RunFolder(run).checkpoints()[-1])


def tensors_of(run: Path) -> dict[str, Any]:
    """Weights, buffers and optimiser state of the newest checkpoint."""
    return {**newest(run).weights(), **newest(run).optimizer()}


def lines_of(folder: Path, name: str, ranks: int = 2) -> list[list[Any]]:
    """The JSON lines that a callback has written, rank by rank."""
    paths = [folder / f"{name}-{rank}" for rank in range(ranks)]
    return [[json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [] for path in paths]
