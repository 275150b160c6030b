"""The commands as a user runs them: in processes of their own."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import run_command

Command = Callable[..., "subprocess.CompletedProcess[str]"]

SMALL = [
    *("-c", "model/tiny.yaml", "-c", "norm/bhyt.yaml", "-c", "data/embedded.yaml", "-c", "trainer/cpu.yaml"),
    *("--model.config.hidden_size", "64", "--model.config.intermediate_size", "96", "--model.config.num_layers", "2"),
    *("--data.embedded_vocab_size", "512", "--data.block_size", "32", "--model.compile", "false"),
]
"""A run of seconds."""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def llmstack(tmp_path: Path) -> Command:
    """``llmstack("fit", ...)`` in an empty folder; the finished process with its output.

    A process of its own, but one that begins with the libraries in memory: loading them takes longer than most runs.
    """
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["llmstack.cli.configured", "llmstack.training.run", "llmstack.inference"])

    def run(*arguments: str, cwd: Path = tmp_path) -> "subprocess.CompletedProcess[str]":
        outputs = [tmp_path / f".{name}" for name in ("stdout", "stderr")]
        process = forked.Process(target=run_command, args=(arguments, cwd, outputs, environment()))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["llmstack", *arguments], 300)
        stdout, stderr = (path.read_text() for path in outputs)
        return subprocess.CompletedProcess(["llmstack", *arguments], process.exitcode, stdout, stderr)

    return run
