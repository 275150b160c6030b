"""diagnostics.csv: what was seen inside a model at some optimiser steps, a number per row (docs/run-folder.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.errors import UserError


class DiagnosticsRow(NamedTuple):
    """The columns, in order."""

    step: int
    """Optimiser steps done; they rise, and all rows of one stand together."""
    layer: int | None
    """Block, from 0, or the number of blocks for what follows the last; None (an empty field): no layer's."""
    site: str
    """Place within the layer or the model (attention, mlp, final, embedding, head); empty: none in particular."""
    name: str
    """The quantity."""
    value: float
    """Its value, never NaN."""


_HEADER = ",".join(DiagnosticsRow._fields) + "\n"


class DiagnosticsFile:
    """A diagnostics.csv. One process writes, after a ``cut``; others may read at any time.

    The rows of a step are one ``write`` to the operating system, so a killed process leaves all of them or none. A
    line without an end (a machine that went down) is not read, and ``cut`` removes it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, rows: Sequence[DiagnosticsRow]) -> None:
        """Add the rows of a step.

        Raises:
            UserError: the file cannot be written.
        """
        if not self.path.exists():
            write_atomically(self.path, _HEADER)
        data = "".join(_line(row) for row in rows).encode()
        with failing_in_one_line(self.path), open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            if file.write(data) != len(data):
                file.truncate(end)
                raise OSError("the rows were written in part (disk full?)")

    def cut(self, step: int) -> None:
        """Drop the rows past ``step`` and an unfinished last line, all at once; if there are none, write nothing."""
        rows = self.read()
        if not self.path.exists():
            return
        text = _HEADER + "".join(_line(row) for row in rows if row.step <= step)
        if len(text.encode()) != self.path.stat().st_size:
            write_atomically(self.path, text)

    def read(self) -> list[DiagnosticsRow]:
        """All rows; none if there is no file.

        Raises:
            UserError: another header, or a line that is no row; names the line.
        """
        try:
            text = self.path.read_bytes().decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        header, *lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")] or [""]
        if header != _HEADER:
            raise UserError(
                f"{self.path}:1: these are not the columns of a diagnostics file ({_HEADER.strip()}); move it away"
            )
        return [self._row(line, number) for number, line in enumerate(lines, 2)]

    def _row(self, line: str, number: int) -> DiagnosticsRow:
        try:
            step, layer, site, name, value = line.rstrip("\n").split(",")
            return DiagnosticsRow(int(step), int(layer) if layer else None, site, name, float(value))
        except ValueError as error:
            raise UserError(f"{self.path}:{number}: not a row of this file ({error})") from error


def _line(row: DiagnosticsRow) -> str:
    """Floats as Python writes them, so that reading gives the same bits back."""
    return f"{row.step},{'' if row.layer is None else row.layer},{row.site},{row.name},{row.value!r}\n"
