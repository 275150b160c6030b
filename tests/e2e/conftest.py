"""The commands as a user runs them: in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    """``llmstack("fit", ...)`` in an empty folder; the finished process with its output."""

    def run(*arguments: str, cwd: Path = tmp_path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "llmstack", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(), timeout=300)

    return run
