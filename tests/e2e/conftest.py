"""The commands as a user runs them: in processes of their own."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
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
    """``llmstack("fit", ...)`` in an empty folder; the finished process with its output.

    A process of its own, but one that begins with the libraries in memory: loading them takes longer than most runs.
    """
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["llmstack.cli.configured", "llmstack.training.run", "llmstack.inference"])

    def run(*arguments: str, cwd: Path = tmp_path) -> "subprocess.CompletedProcess[str]":
        outputs = [tmp_path / f".{name}" for name in ("stdout", "stderr")]
        process = forked.Process(target=_command, args=(arguments, cwd, outputs, environment()))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["llmstack", *arguments], 300)
        stdout, stderr = (path.read_text() for path in outputs)
        return subprocess.CompletedProcess(["llmstack", *arguments], process.exitcode, stdout, stderr)

    return run


def _command(arguments: Sequence[str], cwd: Path, outputs: Sequence[Path], variables: dict[str, str]) -> None:
    import torch

    from llmstack.cli.main import main

    # Of its parent it would have this server's.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["llmstack", *arguments]
    sys.exit(main(arguments))
