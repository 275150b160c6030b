"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from llmstack.errors import UserError


class Parser(argparse.ArgumentParser):
    """Wrong arguments are one line, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong as a :class:`UserError`."""
        raise UserError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def output_file(text: str) -> Path:
    """The type of an argument that names a file to be written: what cannot be written is refused before any work."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file in it")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no ordinary file, and would be replaced by one")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: nothing can be written in this folder")
    return path
