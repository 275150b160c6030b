"""Ranges of layers as text, so that configurations need no lists: ``0-3``, ``7``, ``12-``, ``0-3,12-``."""

from __future__ import annotations

import re

from llmstack.errors import UserError

_RANGE = re.compile(r"(\d+)(-(\d*))?")


def parse_layers(text: str | int, where: str) -> list[tuple[int, int | None]]:
    """First and last layer (from 0, both included; none: the top) of each range in ``text``.

    Args:
        text: layers and ranges of layers with commas between them.
        where: names the option in the refusal.

    Raises:
        UserError: it is not written so, or a range runs backwards.
    """
    ranges = []
    for part in str(text).split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f"{where}: '{text}' is no range of layers; write 0-3, 7, 12- (to the top), or several: 0-3,7"
            )
        first, last = int(match[1]), int(match[3]) if match[3] else None if match[2] else int(match[1])
        if last is not None and last < first:
            raise UserError(f"{where}: the range {part.strip()} runs backwards")
        ranges.append((first, last))
    return ranges


def select_layers(text: str | int, num_layers: int, where: str) -> frozenset[int]:
    """The layers that ``text`` means in a model of ``num_layers`` blocks.

    Raises:
        UserError: see :func:`parse_layers`; or the model has no such layer.
    """
    selected: set[int] = set()
    for first, last in parse_layers(text, where):
        if max(first, last or 0) >= num_layers:
            raise UserError(f"{where}: '{text}' names layers above {num_layers - 1}, the model's last")
        selected.update(range(first, num_layers if last is None else last + 1))
    return frozenset(selected)
