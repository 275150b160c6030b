"""The argument parser of all commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from llmstack.errors import UserError


class Parser(argparse.ArgumentParser):
    """Wrong arguments are one line, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong as a :class:`UserError`."""
        raise UserError(f"{message} (see {self.prog} --help)")
