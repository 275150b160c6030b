"""Generated tasks with known answers: copy or sort a sequence of symbols.

A sample is ``BOS prompt SEP answer EOS``; only the answer and EOS are scored. The ids::

    0 BOS    1 SEP    2 EOS    3 ... 3 + num_symbols - 1 the symbols, in their sorting order

Sample ``i`` is a pure function of (seed, split, i). Which prompts are held out is a rule on the prompt alone
(one in ten, by hash), so no held-out prompt is ever trained on, whatever the seeds.
"""

from itertools import count
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from llmstack.data.order import random64
from llmstack.data.packing import IGNORE_INDEX
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.data.holdout import Split

BOS_ID, SEP_ID, EOS_ID, FIRST_SYMBOL_ID = 0, 1, 2, 3
_HELDOUT_ONE_IN = np.uint64(10)
_DRAWS = 32  # prompts drawn at once: nearly always one of them is on the wanted side
_MIN_PROMPTS = 1000  # with so many, neither side of the hash rule is empty (0.9^1000)


class TaskDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples of one task, padded with EOS (label -100) to ``block_size = 2 * max_length + 2``.

    Prompt lengths are uniform in [min_length, max_length]. Samples are ``input_ids`` and ``labels``, int64
    [block_size], labels already shifted by one.
    """

    def __init__(
        self,
        task: Literal["copy", "sort"],
        split: "Split",
        num_samples: int,
        seed: int = 0,
        num_symbols: int = 26,
        min_length: int = 4,
        max_length: int = 16,
    ) -> None:
        if task not in ("copy", "sort"):
            raise UserError(f"unknown task {task!r}: choose copy or sort")
        if num_samples < 1 or num_symbols < 1 or not 1 <= min_length <= max_length:
            raise UserError(
                f"a task needs num_samples, num_symbols >= 1 and 1 <= min_length <= max_length, not "
                f"{num_samples}, {num_symbols}, {min_length}, {max_length}"
            )
        if num_symbols**min_length < _MIN_PROMPTS:
            raise UserError(
                f"{num_symbols} symbols make only {num_symbols**min_length} prompts of length "
                f"{min_length}, too few to hold some out: {_MIN_PROMPTS} are needed"
            )
        self.task, self.split, self.num_samples, self.seed = task, split, num_samples, seed
        self.num_symbols, self.min_length, self.max_length = num_symbols, min_length, max_length
        self.vocab_size = FIRST_SYMBOL_ID + num_symbols
        self.block_size = 2 * max_length + 2
        self._stream = int(random64(seed, 0 if split == "train" else 1)[0])

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        prompt = self.prompt(index)
        answer = np.sort(prompt) if self.task == "sort" else prompt
        filling = np.full(self.block_size + 1 - (2 * len(prompt) + 3), EOS_ID)
        tokens = torch.from_numpy(
            np.concatenate([[BOS_ID], prompt, [SEP_ID], answer, [EOS_ID], filling]).astype(np.int64)
        )
        labels = tokens[1:].clone()
        labels[: len(prompt) + 1] = IGNORE_INDEX
        labels[2 * len(prompt) + 2 :] = IGNORE_INDEX
        return {"input_ids": tokens[:-1].clone(), "labels": labels}

    def valid_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels other than -100 of each of these samples: its answer and EOS."""
        return self._lengths(indices) + 1

    def prompt(self, index: int) -> NDArray[np.int64]:
        """The symbols of sample ``index``: the first draw that the hash rule gives to this split."""
        length = int(self._lengths(np.array([index]))[0])
        key = int(random64(self._stream, 2 * index + 1)[0])
        for attempt in count():
            draws = random64(key, np.arange(_DRAWS * length) + attempt * _DRAWS * length)
            symbols = (draws % np.uint64(self.num_symbols)).astype(np.int64) + FIRST_SYMBOL_ID
            prompts = symbols.reshape(_DRAWS, length)
            ours = are_heldout(prompts) == (self.split == "heldout")
            if ours.any():
                return prompts[ours.argmax()]
        raise AssertionError("unreachable")

    def _lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        spread = np.uint64(self.max_length - self.min_length + 1)
        return (random64(self._stream, 2 * indices) % spread).astype(np.int64) + self.min_length


def are_heldout(prompts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The rule that keeps one prompt in ten from training, whatever the seed: [n, length] -> [n]."""
    length = prompts.shape[1]
    hashes = random64(random64(prompts, np.arange(length)).sum(axis=1), length)
    return hashes % _HELDOUT_ONE_IN == 0
