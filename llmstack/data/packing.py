"""Blocks of equal length cut from the token stream of prepared data.

Block ``i`` of length ``L`` has the inputs ``tokens[i L : i L + L]`` and as labels the tokens that follow
each, ``tokens[i L + 1 : i L + L + 1]``. Neighbours share one token, which is a label of one and an input of
the next, so every token but the very first is a label once, up to the last partial block.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.data.holdout import Split
    from llmstack.data.prepared import PreparedData

IGNORE_INDEX = -100
"""The label of a position that is not scored (that of ``torch.nn.functional.cross_entropy``)."""


class PackedBlocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of one split: ``input_ids`` and ``labels``, int64 [block_size], labels already shifted by one.

    Args:
        keep_last: also give the last partial block, filled up with inputs 0 and labels -100, so that every
        token
            but the first is scored exactly once (evaluation). Training leaves it out.
        document_ids: add ``document_ids`` int64 [block_size], the number in the split of each input's
        document
            (-1 on filling), for attention that stays within documents.
    """

    def __init__(
        self,
        prepared: "PreparedData",
        split: "Split",
        block_size: int,
        keep_last: bool = False,
        document_ids: bool = False,
    ) -> None:
        self.data = prepared[split]
        self.block_size = block_size
        self.document_ids = document_ids
        num_labels = self.data.num_tokens - 1
        if block_size < 1 or num_labels < (1 if keep_last else block_size):
            raise UserError(
                f"no block of {block_size:,} tokens (and the one that follows) fits in the {split} split of "
                f"{self.data.num_tokens:,}: choose a shorter block or give more data"
            )
        self._num_blocks = -(-num_labels // block_size) if keep_last else num_labels // block_size

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block_size
        valid = min(self.block_size, self.data.num_tokens - 1 - start)
        tokens = self.data.read(start, valid + 1)
        block = {"input_ids": self._fill(tokens[:-1], 0), "labels": self._fill(tokens[1:], IGNORE_INDEX)}
        if self.document_ids:
            block["document_ids"] = self._fill(self.data.document_ids(start, valid), -1)
        return block

    def valid_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels other than -100 in each of these blocks, without reading them."""
        return np.minimum(self.block_size, self.data.num_tokens - 1 - indices * self.block_size)

    def _fill(self, values: torch.Tensor, filling: int) -> torch.Tensor:
        missing = self.block_size - len(values)
        return torch.nn.functional.pad(values, (0, missing), value=filling) if missing else values
