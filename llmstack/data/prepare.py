"""From a source to prepared data: tokenise once, find it in the cache ever after."""

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.data.holdout import RULE, Holdout, Split, choose_holdout, hold_out_all
from llmstack.data.prepared import (
    FORMAT_VERSION,
    SPLITS,
    PreparedData,
    ShardWriter,
    atomic_folder,
    write_index,
)
from llmstack.data.sources import EMBEDDED, Document, Source, describe_source, iterate_documents
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

_ENCODE_CHARACTERS = 1 << 20  # text handed to the tokenizer at once
_VERIFY_BELOW = 1 << 30  # bytes; the checksums of a smaller folder are verified at every start

Report = Callable[[str], None]


def print_report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cache_root() -> Path:
    """``$LLMSTACK_CACHE``, or ``~/.cache/llmstack/data``."""
    return Path(os.environ.get("LLMSTACK_CACHE") or "~/.cache/llmstack/data").expanduser()


def prepare_source(
    source: Source,
    tokenizer: "Tokenizer",
    policy: "BosEosPolicy",
    text_field: str = "text",
    heldout: Source | None = None,
    report: Report = print_report,
) -> PreparedData:
    """The prepared data of a source, tokenised now or found in the cache from an earlier start.

    Args:
        source: ``"embedded"``, or files, globs and folders.
        policy: BOS and EOS around each document.
        text_field: the field of JSON lines, the column of Parquet.
        heldout: files that are the held-out split; none: a part of the source.
        report: receives a line of progress every few seconds of long work.
    """
    sources = describe_source(source)
    held_out = None if heldout is None else describe_source(heldout)
    key = {
        "format_version": FORMAT_VERSION,
        "sources": sources,
        "text_field": text_field,
        "tokenizer": tokenizer.fingerprint,
        "policy": policy.to_dict(),
        "holdout": RULE if held_out is None else held_out,
    }
    root = cache_root()
    path = root / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    fresh = False
    if not path.exists():
        with failing_in_one_line(root), atomic_folder(path) as folder:
            if fresh := folder is not None:
                write_prepared(folder, source, tokenizer, policy, sources, text_field, held_out, report)
    prepared = PreparedData(path, tokenizer)
    if not fresh and prepared.num_stored_bytes < _VERIFY_BELOW:
        prepared.verify()
    return prepared


def write_prepared(
    folder: Path,
    source: Source,
    tokenizer: "Tokenizer",
    policy: "BosEosPolicy",
    sources: list[dict[str, Any]],
    text_field: str,
    held_out: list[dict[str, Any]] | None,
    report: Report,
) -> None:
    """Tokenise a source, and the files that are held out, into a folder that exists and is empty: both splits and the
    index."""
    # A list of absolute files, so that both passes read what `sources` describes.
    files: Source = EMBEDDED if source == EMBEDDED else [entry["path"] for entry in sources]
    pieces: Iterable[_Piece]
    if held_out is None:
        holdout = choose_holdout(lambda: iterate_documents(files, text_field), tokenizer)
        pieces = _pieces(iterate_documents(files, text_field), holdout, SPLITS)
    else:
        heldout = [entry["path"] for entry in held_out]
        holdout = hold_out_all(iterate_documents(heldout, text_field))
        pieces = itertools.chain(
            _pieces(iterate_documents(files, text_field), holdout, ("train",)),
            _pieces(iterate_documents(heldout, text_field), holdout, ("heldout",)),
        )
    writers = {split: ShardWriter(folder, split, tokenizer.vocab_size) for split in SPLITS}
    progress = _Progress(report)
    for group in _groups(pieces):
        encoded = tokenizer.encode_batch([piece.text for piece in group])
        for piece, ids in zip(group, encoded, strict=True):
            ends = replace(policy, bos=policy.bos and piece.first, eos=policy.eos and piece.last)
            writers[piece.split].add(ends.wrap(ids, tokenizer), len(piece.text.encode()), end=piece.last)
        progress.update(group, sum(map(len, encoded)))
    for writer in writers.values():
        writer.close()
    for split, writer in writers.items():
        if not writer.shards:
            raise UserError(f"no text is left for the {split} split: all of the source stands in the held-out files")
    if describe_source(files) != sources or (held_out is not None and describe_source(heldout) != held_out):
        raise UserError("a source file changed while it was being prepared: start again when it is complete")
    shards = {split: writer.shards for split, writer in writers.items()}
    write_index(folder, shards, tokenizer, policy, sources, holdout, RULE if held_out is None else held_out)


@dataclass(frozen=True)
class _Piece:
    """A text tokenised by itself: a document's part in a split, or a section (the first, the last?) of it."""

    split: Split
    text: str
    first: bool
    last: bool


def _pieces(documents: Iterable[Document], holdout: Holdout, splits: Sequence[Split]) -> Iterator[_Piece]:
    for document in documents:
        for split, texts in holdout.divide(document):
            for i, text in enumerate(texts if split in splits else ()):
                yield _Piece(split, text, first=i == 0, last=i == len(texts) - 1)


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    group, size = list[_Piece](), 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= _ENCODE_CHARACTERS or len(group) >= 4096:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Progress:
    """A line every five seconds, the first after two."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._start = time.monotonic()
        self._next = self._start + 2
        self._documents = self._tokens = self._bytes = 0

    def update(self, group: list[_Piece], tokens: int) -> None:
        self._documents += sum(piece.last for piece in group)
        self._tokens += tokens
        self._bytes += sum(len(piece.text.encode()) for piece in group)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 5
            rate = self._bytes / 1e6 / (now - self._start)
            self._report(f"prepare: {self._documents:,} documents, {self._tokens:,} tokens, {rate:.1f} MB/s of text")
