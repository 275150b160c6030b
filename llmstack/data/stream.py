"""Training text read and tokenised while training goes on, for those who do not prepare it; resumed exactly.

The files are dealt to lanes, one for each worker of each rank; of fewer files than lanes, several lanes share one by
rows. A lane reads its files in a new order every epoch, without end, cuts the token stream into windows of
:data:`WINDOW` blocks and gives the blocks of a window in a pseudo-random order. So where a lane stands is said by where
its window began (epoch, file, row, token) and how many of its blocks were given: to go on, the window is read and
tokenised once more.

The rows are read by :mod:`llmstack.data.sources` and not by the streaming of `datasets`: its shuffle buffer is lost on
resume, its division among workers begins with the first worker whichever was next, and it stops at a bad row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from llmstack.data.holdout import text_hash
from llmstack.data.order import SampleOrder, random64
from llmstack.data.prepare import MAX_BAD_SHARE
from llmstack.data.sources import BadRow, Document, Piece, read_rows
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

WINDOW = 1024
"""Blocks among which a lane shuffles."""

_ENCODE_DOCUMENTS = 256
_FEW_ROWS = 1000
_NAMED = 100


@dataclass(frozen=True)
class Place:
    """Where a lane stands."""

    epoch: int = 0
    file: int = 0
    """In the order of the epoch, where the window began."""
    row: int = 0
    """The document of that file in which the window began."""
    offset: int = 0
    """Tokens of that document that belong to windows before."""
    window: int = 0
    given: int = 0
    """Blocks of the window that were given."""


@dataclass(frozen=True)
class StreamSource:
    """What is streamed, the same for all lanes."""

    files: tuple[Path, ...]
    tokenizer: Tokenizer
    policy: BosEosPolicy
    text_field: str
    excluded: frozenset[bytes]
    """Hashes of texts that are held out."""
    block_size: int
    document_ids: bool
    seed: int


def hashes_of(files: Sequence[Path], text_field: str) -> frozenset[bytes]:
    """Of all texts in these files."""
    rows = (row for path in files for row in read_rows(Piece(path), text_field))
    return frozenset(text_hash(row.text) for row in rows if isinstance(row, Document))


class Lane:
    """The blocks of one lane, from a place on, without end.

    ``skipped`` fills with the bad rows; ``rows`` counts all.
    """

    def __init__(self, source: StreamSource, number: int, lanes: int, place: Place) -> None:
        files = source.files
        self.source, self.number, self.place = source, number, place
        if lanes <= len(files):
            self._files, self._share, self._sharers = files[number::lanes], 0, 1
        else:
            shared = number % len(files)
            self._files = (files[shared],)
            self._share = number // len(files)
            self._sharers = len(range(shared, lanes, len(files)))
        own = int(random64(source.seed, number)[0])
        self._file_order, self._seed = SampleOrder(len(self._files), own), own
        self.skipped: list[BadRow] = []
        self.rows = 0

    def __iter__(self) -> Iterator[tuple[dict[str, NDArray[np.int64]], Place]]:
        """Each block, with the place after it."""
        size, place = self.source.block_size, self.place
        for tokens, owners, after in self._windows(place):
            order = SampleOrder(WINDOW, int(random64(self._seed, place.window)[0]))
            for given in range(place.given, WINDOW):
                start = size * int(order(np.array([given]))[0])
                block = {"input_ids": tokens[start : start + size], "labels": tokens[start + 1 : start + size + 1]}
                if self.source.document_ids:
                    block["document_ids"] = owners[start : start + size]
                yield block, replace(place, given=given + 1) if given + 1 < WINDOW else after
            place = after

    def _windows(self, place: Place) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], Place]]:
        """Of each window its tokens (more than its blocks hold), the document of each, and where the next begins."""
        wanted, window = WINDOW * self.source.block_size, place.window
        parts, count, offset = list[NDArray[np.int64]](), 0, place.offset
        for epoch, file, row, ids in self._tokenised(place):
            parts.append(ids[offset:])
            count, offset = count + len(ids) - offset, 0
            while count > wanted:
                tokens = np.concatenate(parts)
                owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
                # The last token of a window is a label there and the first input of the next.
                parts, count, window = [tokens[wanted:]], count - wanted, window + 1
                yield tokens, owners, Place(epoch, file, row, len(ids) - count, window)

    def _tokenised(self, place: Place) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
        """Where each document stands, and its ids, from that on in which the window began."""
        tokenizer, policy = self.source.tokenizer, self.source.policy
        documents = self.documents(place.epoch, place.file, place.row)
        while group := list(islice(documents, _ENCODE_DOCUMENTS)):
            encoded = tokenizer.encode_batch([text for *_, text in group])
            for (epoch, file, row, _), ids in zip(group, encoded, strict=True):
                yield epoch, file, row, np.array(policy.wrap(ids, tokenizer), dtype=np.int64)
        raise UserError(f"{self._files[0]} and the other files of its lane hold no text to train on")

    def documents(self, epoch: int = 0, file: int = 0, row: int = 0) -> Iterator[tuple[int, int, int, str]]:
        """Where each text of this lane stands, and it, from a row on, epoch after epoch.

        Ends after an epoch without any.
        """
        while True:
            found = False
            for place in range(file, len(self._files)):
                path = self._files[int(self._file_order(np.array([epoch * len(self._files) + place]))[0])]
                for at, read in enumerate(read_rows(Piece(path), self.source.text_field)):
                    if at < row or at % self._sharers != self._share:
                        continue
                    self.rows += 1
                    if isinstance(read, BadRow):
                        self.skipped.append(read)
                    elif self._is_wanted(read):
                        found = True
                        yield epoch, place, at, read.text
                row = 0
            if not found and file == 0:
                return
            epoch, file = epoch + 1, 0

    def _is_wanted(self, document: Document) -> bool:
        return text_hash(document.text) not in self.source.excluded


class StreamMicroBatches(IterableDataset[dict[str, Any]]):
    """The micro-batches of one rank, each from one of its lanes, which are its workers."""

    def __init__(
        self,
        source: StreamSource,
        micro_batch_size: int,
        world_size: int,
        rank: int,
        places: Sequence[Place],
        first: int,
    ) -> None:
        self.source, self.micro_batch_size = source, micro_batch_size
        self.world_size, self.rank = world_size, rank
        self.places = places
        self.first = first
        """Micro-batches that the rank has had: the loader asks its first worker first, whose turn it may not be."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._batches()
        except UserError as error:
            # What is raised in a worker would come with its traceback.
            yield {"error": str(error)}

    def _batches(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        count, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        own = (number + self.first) % count
        lane = Lane(self.source, self.rank * count + own, self.world_size * count, self.places[own])
        blocks, said, rows = iter(lane), 0, 0
        while True:
            group = [next(blocks) for _ in range(self.micro_batch_size)]
            batch: dict[str, Any] = {
                name: torch.from_numpy(np.stack([block[name] for block, _ in group])) for name in group[0][0]
            }
            skipped, said = [(row.where, row.reason) for row in lane.skipped[said:]], len(lane.skipped)
            new_rows, rows = lane.rows - rows, lane.rows
            yield batch | {"lane": own, "place": asdict(group[-1][1]), "skipped": skipped, "rows": new_rows}


class StreamLoader:
    """What a rank trains on: micro-batches with their place in the run, and where the lanes stood after each.

    Args:
        loader: of this rank's :class:`StreamMicroBatches`; each of its workers is a lane, or this process the only one.
        accumulate: micro-batches of a step.
        start_step: optimiser steps tried before.
        start_sample: samples of all ranks that those took.
        report: told of rows that are skipped.
    """

    def __init__(
        self,
        loader: DataLoader[dict[str, Any]],
        accumulate: int,
        start_step: int,
        start_sample: int,
        report: Any,
    ) -> None:
        self.batches, self.accumulate = cast(StreamMicroBatches, loader.dataset), accumulate
        self.start_step, self.start_sample = start_step, start_sample
        self.report = report
        self._loader = loader
        self._places = list(self.batches.places)
        # The trainer fetches ahead: places are remembered until the batches before them are trained on.
        self._ahead: deque[tuple[int, int, Place]] = deque()
        self._skipped = self._rows = 0
        self._named: set[str] = set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        size, world = self.batches.micro_batch_size, self.batches.world_size
        block = self.batches.source.block_size
        for number, batch in enumerate(self._loader):
            if "error" in batch:
                raise UserError(batch["error"])
            step, micro_batch = divmod(number, self.accumulate)
            self._ahead.append((number, batch.pop("lane"), Place(**batch.pop("place"))))
            self._count(batch.pop("skipped"), batch.pop("rows"))
            first = self.start_sample + (number * world + self.batches.rank) * size
            yield batch | {
                "sample_ids": torch.arange(first, first + size),
                "valid_tokens": torch.tensor(self.accumulate * world * size * block),
                "step": self.start_step + step,
                "micro_batch": micro_batch,
            }

    def places(self, steps: int) -> list[dict[str, Any]]:
        """Where each lane of this rank stood after ``steps`` tried steps of the run."""
        made = (steps - self.start_step) * self.accumulate
        while self._ahead and self._ahead[0][0] < made:
            _, lane, place = self._ahead.popleft()
            self._places[lane] = place
        return [asdict(place) for place in self._places]

    def _count(self, skipped: list[tuple[str, str]], rows: int) -> None:
        self._skipped += len(skipped)
        for where, reason in skipped:
            # Each once, not in every epoch.
            if where not in self._named and len(self._named) < _NAMED:
                self._named.add(where)
                self.report(f"skipped {where}: {reason}")
        self._rows += rows
        if self._rows >= _FEW_ROWS and self._skipped > MAX_BAD_SHARE * self._rows:
            raise UserError(
                f"{self._skipped:,} of the first {self._rows:,} rows are bad, more than a share of {MAX_BAD_SHARE:g}; "
                "the first are named above"
            )
