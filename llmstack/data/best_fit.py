"""Blocks into which documents are put whole, as many as fit: for sets of short documents, fine-tuning above all.

Best-fit decreasing (Johnson, 1973; for language models Ding et al., arXiv 2404.10830): from the longest document to the
shortest, each goes into the fullest block that still has room for it, or opens a new one. A document longer than a
block is cut into pieces of a block each and the rest, which are packed like documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from llmstack.data.packing import IGNORE_INDEX
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.data.holdout import Split
    from llmstack.data.prepared import PreparedData

MAX_DOCUMENTS = 10_000_000
"""A larger set would wait minutes for its packing at every start."""


class BestFitBlocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of one split: ``input_ids``, ``labels`` and ``document_ids``, int64 [block_size].

    Labels are shifted by one within each piece, so of a document every token but the first is a label once and nothing
    is learned across documents. ``document_ids`` number the pieces of a block. Filling has input 0, label -100, id -1.

    Raises:
        UserError: no document has two tokens, or there are more than :data:`MAX_DOCUMENTS`.
    """

    def __init__(self, prepared: PreparedData, split: Split, block_size: int) -> None:
        self.data, self.block_size = prepared[split], block_size
        if self.data.num_documents > MAX_DOCUMENTS:
            raise UserError(
                f"{self.data.num_documents:,} documents are too many for data.packing best_fit (at most "
                f"{MAX_DOCUMENTS:,}): leave it at concatenate"
            )
        lengths = self.data.document_lengths()
        starts = np.cumsum(lengths) - lengths
        # A piece of n tokens has n - 1 inputs with a label; neighbours in a document share one token.
        wanted = np.maximum(lengths - 1, 0)
        pieces = -(-wanted // block_size)
        self.num_documents, self.num_cut = len(lengths), int((pieces > 1).sum())
        """Documents, and those among them that are longer than a block."""
        if not pieces.any():
            raise UserError(f"the {split} split has no document of two tokens or more")
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._starts = np.repeat(starts, pieces) + number * block_size
        self._sizes = np.minimum(np.repeat(wanted, pieces) - number * block_size, block_size)
        block_of = best_fit_decreasing(self._sizes, block_size)
        self._pieces = np.argsort(block_of, kind="stable")
        self._first_piece = np.searchsorted(block_of[self._pieces], np.arange(block_of.max() + 2))
        self._valid = np.bincount(block_of, weights=self._sizes).astype(np.int64)

    def __len__(self) -> int:
        return len(self._valid)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        block = {
            "input_ids": torch.zeros(self.block_size, dtype=torch.int64),
            "labels": torch.full((self.block_size,), IGNORE_INDEX),
            "document_ids": torch.full((self.block_size,), -1),
        }
        at = 0
        for number, piece in enumerate(self._pieces[self._first_piece[index] : self._first_piece[index + 1]]):
            size = int(self._sizes[piece])
            tokens = self.data.read(int(self._starts[piece]), size + 1)
            block["input_ids"][at : at + size] = tokens[:-1]
            block["labels"][at : at + size] = tokens[1:]
            block["document_ids"][at : at + size] = number
            at += size
        return block

    def valid_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels other than -100 in each of these blocks, without reading them."""
        return self._valid[indices]

    @property
    def waste(self) -> float:
        """Share of all positions that is filling."""
        return 1 - int(self._valid.sum()) / (len(self) * self.block_size)


def best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin of each item, bins counted from 0 in the order of their opening; all sizes are 1 to ``capacity``."""
    found = np.empty(len(sizes), dtype=np.int64)
    bins_with_room: dict[int, list[int]] = {}
    rooms = list[int]()  # the keys of bins_with_room, sorted
    opened = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = bisect_left(rooms, size)
        if fitting < len(rooms):
            room = rooms[fitting]
            chosen = bins_with_room[room].pop()
            if not bins_with_room[room]:
                del bins_with_room[room], rooms[fitting]
        else:
            room, chosen, opened = capacity, opened, opened + 1
        found[item] = chosen
        if room > size:
            if room - size not in bins_with_room:
                insort(rooms, room - size)
            bins_with_room.setdefault(room - size, []).append(chosen)
    return found
