"""Small runs made through the command itself, eager unless a test says otherwise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmstack.cli.main import main

TINY = [
    *("-c", "model/tiny.yaml", "-c", "norm/bhyt.yaml", "-c", "data/embedded.yaml", "-c", "trainer/cpu.yaml"),
    *("--model.config.hidden_size", "64", "--model.config.intermediate_size", "96", "--model.config.num_layers", "2"),
    *("--data.embedded_vocab_size", "512", "--data.block_size", "32", "--run.validate_every", "null"),
]

Fit = Callable[..., int]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """``fit(name, *arguments)`` trains in ``tmp_path/name`` and returns the exit status."""

    def run(name: str, *arguments: str, compile: bool = False) -> int:
        common = [*TINY, "--model.compile", str(compile).lower(), "--run.dir", str(tmp_path / name)]
        return main(["fit", *common, *arguments])

    return run
