"""A source cut into units of work: the same ones whoever cuts, so that anyone can do them in any order.

A unit is a run of consecutive pieces of files of about :data:`UNIT_BYTES`: large files of JSON lines and Parquet are
cut, small files of any kind are taken together, a large compressed or plain-text file is a unit by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmstack.data.holdout import Split
from llmstack.data.sources import BadRow, Document, Piece, embedded_documents, read_rows, row_groups

UNIT_BYTES = 1 << 28


@dataclass(frozen=True)
class Unit:
    """What one process does at a time."""

    number: int
    pieces: tuple[Piece, ...]
    """None: the embedded corpus."""
    splits: tuple[Split, ...]
    """Where its documents may go; what belongs elsewhere is left out."""

    def rows(self, text_field: str) -> Iterator[Document | BadRow]:
        """All rows in order."""
        if not self.pieces:
            yield from embedded_documents()
        for piece in self.pieces:
            yield from read_rows(piece, text_field)


def cut_units(files: Sequence[Path], unit_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """The pieces of each unit of ``files``, in order."""
    unit, size = list[Piece](), 0
    for path in files:
        for piece, num_bytes in _cut(path, unit_bytes):
            if unit and size + num_bytes > unit_bytes:
                yield tuple(unit)
                unit, size = [], 0
            unit.append(piece)
            size += num_bytes
    if unit:
        yield tuple(unit)


def _cut(path: Path, unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    """Pieces of a file, with about how many bytes each has."""
    size = path.stat().st_size
    if size <= unit_bytes or path.suffix not in (".jsonl", ".json", ".parquet"):
        yield Piece(path), size
        return
    if path.suffix != ".parquet":
        count = -(-size // unit_bytes)
        borders = [size * i // count for i in range(count)]
        for start, stop in zip(borders, [*borders[1:], None], strict=True):
            yield Piece(path, start, stop), size // count
        return
    first, total = 0, 0
    groups = row_groups(path)
    for number, (_, num_bytes) in enumerate(groups):
        if number > first and total + num_bytes > unit_bytes:
            yield Piece(path, first, number), total
            first, total = number, 0
        total += num_bytes
    yield Piece(path, first, None), total
