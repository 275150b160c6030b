"""How ids of different rows become the tensors that a runner takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llmstack.inference.runner import Runner


def read_texts(runner: Runner, rows: Sequence[int], texts: Sequence[Sequence[int]], start: int, chunk: int) -> Tensor:
    """Let ``rows`` read their ``texts`` from position ``start`` on, ``chunk`` tokens at a time.

    Shorter texts are padded: what a row writes beyond its end is masked until its own tokens take the place.

    Args:
        runner: reads.
        rows: in ascending order.
        texts: of each row from position 0 on, longer than ``start``.
        start: positions before this have been read.
        chunk: tokens.

    Returns:
        logits [rows, vocab] of what follows each text.
    """
    last: dict[int, Tensor] = {}
    for begin in range(start, max(map(len, texts)), chunk):
        going = [index for index, text in enumerate(texts) if len(text) > begin]
        pieces = [texts[index][begin : begin + chunk] for index in going]
        width = max(map(len, pieces))
        ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces], device=runner.device)
        hidden = runner.extend(ids, begin, torch.tensor([rows[index] for index in going], device=runner.device))
        for place, index in enumerate(going):
            if len(texts[index]) <= begin + chunk:
                last[index] = hidden[place, len(texts[index]) - 1 - begin]
    return runner.head(torch.stack([last[index] for index in range(len(texts))]))


def decode_rows(runner: Runner, fed: Mapping[int, tuple[int, Sequence[int]]], width: int) -> Tensor:
    """Let rows read a few tokens each, the others nothing.

    What fills the batch up is read at the last position, which nothing real is: of ``max_length`` tokens the last is
    found, and not read any more.

    Args:
        runner: reads.
        fed: row -> position of the first id, and at most ``width`` ids.
        width: of the batch.

    Returns:
        logits [batch, width, vocab].
    """
    ids = torch.zeros(runner.batch_size, width, dtype=torch.int64)
    positions = torch.full((runner.batch_size, width), runner.max_length - 1)
    for row, (first, tokens) in fed.items():
        ids[row, : len(tokens)] = torch.tensor(tokens)
        positions[row, : len(tokens)] = torch.arange(first, first + len(tokens))
    return runner.decode(ids.to(runner.device), positions.to(runner.device))
