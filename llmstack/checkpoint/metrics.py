"""metrics.csv: one row per logged optimiser step, one schema for every writer and reader."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.errors import UserError


@dataclass(frozen=True)
class MetricsRow:
    """The columns, in order; None is an empty field."""

    step: int
    """Optimiser steps done; no two rows have the same one, and they rise."""
    tokens_seen: int | None = None
    """Tokens trained on so far, over all ranks."""
    loss: float | None = None
    """Training loss of this step, nats per token, over all tokens of all ranks and micro-batches."""
    learning_rate: float | None = None
    """Rate that this step was taken with."""
    grad_norm: float | None = None
    """2-norm of the whole gradient before clipping."""
    spike_score: float | None = None
    """Standard deviations that the loss lies above the mean of the 128 steps before; empty where they are too few."""
    step_seconds: float | None = None
    """Wall time of the step; validation and saving are in none. The four after it are parts of it."""
    data_seconds: float | None = None
    """Waiting for batches."""
    forward_backward_seconds: float | None = None
    """Forward and backward passes, and what ranks exchange meanwhile."""
    optimizer_seconds: float | None = None
    """Clipping and the optimiser; under ZeRO also the exchange of the new weights."""
    communication_seconds: float | None = None
    """Time in exchanges between ranks, wherever it falls; measured in profiled steps alone."""
    tokens_per_second: float | None = None
    """Tokens of the step (padding not counted) / step_seconds, over all ranks; empty in the first step of a start."""
    tokens_per_second_per_device: float | None = None
    """The same of one rank."""
    tflops_per_device_palm: float | None = None
    """Model FLOPs of one rank per second / 10^12 by PaLM's convention: each token attends to the whole block."""
    mfu_palm: float | None = None
    """Those over the device's dense peak; empty where that is not known, as on a CPU."""
    tflops_per_device_causal: float | None = None
    """The same with half the attention, as a causal mask leaves it. Neither counts what is computed again."""
    mfu_causal: float | None = None
    """Those over the device's dense peak."""
    peak_memory_bytes: int | None = None
    """Most memory that rank 0 had taken by then: tensors on a GPU, the whole process on a CPU."""
    val_loss: float | None = None
    """Loss over the held-out data after this step, nats per token."""
    val_perplexity: float | None = None
    """exp(val_loss)."""
    val_tokens: int | None = None
    """Held-out tokens that were predicted."""


COLUMNS = tuple(field.name for field in fields(MetricsRow))
_INTEGERS = {"step", "tokens_seen", "peak_memory_bytes", "val_tokens"}
_HEADER = ",".join(COLUMNS) + "\n"


class MetricsFile:
    """A metrics.csv. One process writes; others may read at any time.

    A row is one ``write`` to the operating system, so a killed process loses none. A file that ends inside a row (a
    machine that went down) is read without that row, and the next ``append`` or ``cut`` removes it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._last: MetricsRow | None = None
        self._known_size = -1

    def append(self, row: MetricsRow) -> None:
        """Add a row. It must be of a later step than the last one.

        Raises:
            UserError: the file has another header or cannot be written.
        """
        self._prepare()
        if self._last is not None and row.step <= self._last.step:
            raise ValueError(f"{self.path}: a row of step {row.step} after one of step {self._last.step}")
        self._write(_line(row), self._known_size)
        self._last = row

    def amend_last(self, **values: float | None) -> None:
        """Fill empty fields of the last row in place (validation at the end of a step).

        The longer line is written over the old one by a single call: a kill leaves the one or the other.
        """
        self._prepare()
        if self._last is None:
            raise ValueError(f"{self.path} has no row to amend")
        taken = [name for name in values if getattr(self._last, name) is not None]
        if taken:
            raise ValueError(f"{self.path}: step {self._last.step} has {', '.join(taken)} already")
        row = MetricsRow(**{**asdict(self._last), **values})
        self._write(_line(row), self._known_size - len(_line(self._last)))
        self._last = row

    def cut(self, step: int) -> None:
        """Drop the rows past ``step`` and an unfinished last line, all at once; if there are none, write nothing."""
        lines = self._lines()
        if not lines:
            return
        kept = [line for line, row in lines if row is None or row.step <= step]
        text = "".join(kept)
        if len(text.encode()) != self.path.stat().st_size:
            write_atomically(self.path, text)
        self._known_size = -1

    def read(self) -> list[dict[str, Any]]:
        """All rows as {column: number or None}; none if there is no file.

        Raises:
            UserError: another header, or a row that is not numbers; names the line.
        """
        return [asdict(row) for _, row in self._lines() if row is not None]

    def _prepare(self) -> None:
        """Make the file end with a whole row, and know that row."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size == self._known_size:
            return
        lines = self._lines()
        self._known_size = sum(len(line) for line, _ in lines)
        self._last = lines[-1][1] if lines else None
        with failing_in_one_line(self.path):
            if lines and size != self._known_size:
                os.truncate(self.path, self._known_size)
        if not lines:
            write_atomically(self.path, _HEADER)
            self._known_size = len(_HEADER)

    def _write(self, line: str, offset: int) -> None:
        data = line.encode()
        with failing_in_one_line(self.path), open(self.path, "r+b", buffering=0) as file:
            if os.pwrite(file.fileno(), data, offset) != len(data):
                os.ftruncate(file.fileno(), self._known_size)
                raise OSError("the row was written in part (disk full?)")
        self._known_size = offset + len(data)

    def _lines(self) -> list[tuple[str, MetricsRow | None]]:
        """The whole lines: the header with None, then each with its row."""
        try:
            text = self.path.read_bytes().decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        if (lines[0] if lines else text) != _HEADER[: len(text)]:
            raise UserError(
                f"{self.path}:1: these are not the columns of a metrics file ({_HEADER.strip()}); move it away"
            )
        return [(line, None if number == 1 else self._row(line, number)) for number, line in enumerate(lines, 1)]

    def _row(self, line: str, number: int) -> MetricsRow:
        texts = line.rstrip("\n").split(",")
        try:
            step = int(texts[0])
            rest = {name: _number(name, text) for name, text in zip(COLUMNS[1:], texts[1:], strict=True)}
        except ValueError as error:
            raise UserError(f"{self.path}:{number}: not a row of this file ({error})") from error
        return MetricsRow(step, **rest)  # type: ignore[arg-type]


def _line(row: MetricsRow) -> str:
    """Floats as Python writes them, so that reading gives the same bits back."""
    return ",".join(_text(name, value) for name, value in asdict(row).items()) + "\n"


def _text(column: str, value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if column in _INTEGERS else repr(float(value))


def _number(column: str, text: str) -> float | int | None:
    if not text:
        return None
    return int(text) if column in _INTEGERS else float(text)
