"""A command in a process that has been forked for it."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run_command(arguments: Sequence[str], cwd: Path, outputs: Sequence[Path], variables: dict[str, str]) -> None:
    """Ends the process with the command's status; stdout and stderr go to files."""
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
