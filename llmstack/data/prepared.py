"""The on-disk format of tokenised text, to write and to read.

A prepared folder has ``index.json``, the tokenizer (``tokenizer/``), the rows that were skipped (``skipped.jsonl``:
where and why), and, for each unit of the source and split (``train``, ``heldout``), Arrow IPC stream shards
``units/<unit>/<split>-<number>.arrow`` with one row a document::

    tokens  list<uint16 | uint32>   BOS and EOS included; uint16 where every id is below 65,536
    bytes   int64                   UTF-8 bytes of the document's text

So the values of a record batch are the flat token stream, its offsets are the document boundaries, and
``datasets.Dataset.from_file`` reads a shard as it is. ``index.json`` records the format version, tokenizer,
BOS/EOS policy, sources, held-out split, counts, and the size and SHA-256 of each shard. A folder appears
under its name complete or not at all.
"""

import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmstack.checkpoint.files import sync_folder
from llmstack.data.holdout import RULE, Holdout, Split
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

FORMAT_VERSION = 2
SPLITS: tuple[Split, ...] = ("train", "heldout")
TOKENS_PER_BATCH = 1 << 20
TOKENS_PER_SHARD = 1 << 27
_VERIFY_BELOW = 1 << 30  # bytes; the checksums of a smaller folder are verified at every start
INDEX = "index.json"
SKIPPED = "skipped.jsonl"
TOKENIZER = "tokenizer"
UNITS = "units"


class Unfinished(UserError):
    """Work that stopped and can be taken up again: what is finished is kept."""


class ShardWriter:
    """Writes the documents of one split into shards; memory is that of one record batch.

    ``shards`` lists what ``index.json`` says of each finished shard.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        vocab_size: int,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        tokens_per_shard: int = TOKENS_PER_SHARD,
    ) -> None:
        self.shards: list[dict[str, Any]] = []
        self._folder, self._split, self._vocab_size = folder, split, vocab_size
        self._tokens_per_batch, self._tokens_per_shard = tokens_per_batch, tokens_per_shard
        self._dtype = token_dtype(vocab_size)
        self._stream: Any = None
        self._start_batch()

    def add(self, ids: list[int], num_bytes: int, end: bool = True) -> None:
        """Append tokens and text bytes to the current document; ``end`` closes it."""
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self._vocab_size):
            raise UserError(f"the tokenizer gave id {tokens.max()}, outside its vocabulary of {self._vocab_size}")
        self._pieces.append(tokens.astype(self._dtype))
        self._num_tokens += len(tokens)
        self._bytes[-1] += num_bytes
        if end:
            self._offsets.append(self._num_tokens)
            self._bytes.append(0)
            if self._num_tokens >= self._tokens_per_batch:
                self._write_batch()

    def close(self) -> None:
        self._write_batch()
        self._close_shard()

    def _start_batch(self) -> None:
        self._pieces: list[NDArray[Any]] = []
        self._offsets, self._bytes, self._num_tokens = [0], [0], 0

    def _write_batch(self) -> None:
        import pyarrow as pa

        if len(self._offsets) == 1:
            return
        if self._num_tokens >= 1 << 31:
            raise UserError(f"a document has over {1 << 31:,} tokens, the format's limit: split it")
        tokens = pa.ListArray.from_arrays(
            pa.array(np.array(self._offsets, dtype=np.int32)), pa.array(np.concatenate(self._pieces))
        )
        sizes = pa.array(self._bytes[:-1], type=pa.int64())
        batch = pa.record_batch([tokens, sizes], names=["tokens", "bytes"])
        if self._stream is None:
            name = f"{self._split}-{len(self.shards):05d}.arrow"
            self.shards.append({"file": name, "documents": 0, "tokens": 0, "bytes": 0})
            self._file = (self._folder / name).open("wb")
            self._stream = pa.ipc.new_stream(self._file, batch.schema)
        self._stream.write_batch(batch)
        shard = self.shards[-1]
        shard["documents"] += len(sizes)
        shard["tokens"] += self._num_tokens
        shard["bytes"] += sum(self._bytes)
        self._start_batch()
        if shard["tokens"] >= self._tokens_per_shard:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._stream is None:
            return
        self._stream.close()
        _sync_and_close(self._file)
        self._stream = None
        path = self._folder / self.shards[-1]["file"]
        self.shards[-1] |= {"size": path.stat().st_size, "sha256": _sha256(path)}


def write_index(
    folder: Path,
    identity: str,
    shards: dict[Split, list[dict[str, Any]]],
    tokenizer: "Tokenizer",
    policy: "BosEosPolicy",
    sources: list[dict[str, Any]],
    holdout: Holdout,
    rule: Any = RULE,
    skipped_rows: int = 0,
) -> None:
    """Write ``index.json``, which makes a folder of finished shards prepared data.

    ``identity`` is a hash of all that the data depend on; ``rule`` is what defines the held-out split beside the texts:
    the rule, or the files that are held out.
    """
    splits = {
        split: {kind: sum(s[kind] for s in records) for kind in ("documents", "tokens", "bytes")} | {"shards": records}
        for split, records in shards.items()
    }
    index = {
        "format_version": FORMAT_VERSION,
        "identity": identity,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "policy": policy.to_dict(),
        "sources": sources,
        "skipped_rows": skipped_rows,
        "holdout": {
            "rule": rule,
            "unit": holdout.unit,
            "units": holdout.num_units,
            "heldout_units": holdout.num_heldout,
            "sha256": holdout.fingerprint,
        },
        "splits": splits,
    }
    file = (folder / INDEX).open("wb")
    file.write(json.dumps(index, indent=1).encode())
    _sync_and_close(file)


@contextmanager
def growing_folder(path: Path, identity: str) -> Iterator[Path | None]:
    """A folder beside ``path`` that takes its name on success; None if ``path`` is there already.

    What is in it survives a kill, a full disk or an interruption and is found by the next who makes a folder of the
    same ``identity``; after a :class:`UserError` it is removed, unless that is :class:`Unfinished`. A lock that dies
    with its process: of two that prepare the same data one works and the other waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"{path.parent} cannot be locked ({error}): choose a folder on another disk") from error
        if path.exists():
            yield None
            return
        growing = path.with_name(f".{path.name}.tmp")
        mark = growing / ".identity"
        if growing.exists() and not mark.is_file() and any(growing.iterdir()):
            raise UserError(f"{growing} is in the way and none of ours: move it elsewhere")
        if not mark.is_file() or mark.read_text() != identity:
            shutil.rmtree(growing, ignore_errors=True)
            growing.mkdir()
            mark.write_text(identity)
        try:
            yield growing
        except UserError as error:
            if not isinstance(error, Unfinished):
                shutil.rmtree(growing, ignore_errors=True)
            raise
        mark.unlink()
        sync_folder(growing)
        growing.rename(path)
        sync_folder(path.parent)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Batch:
    tokens: NDArray[Any]  # [tokens of the batch], a view of the mapped file
    offsets: NDArray[np.int32]  # [documents of the batch + 1]


class _Shard:
    """A memory-mapped shard: its batches with the token and document at which each starts in the split."""

    def __init__(self, folder: Path, record: dict[str, Any], first_token: int, first_document: int) -> None:
        import pyarrow as pa

        path = folder / record["file"]

        self.batches: list[_Batch] = []
        self.first_tokens, self.first_documents = [first_token], [first_document]
        try:
            with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
                for batch in stream:
                    column = batch.column("tokens")
                    self.batches.append(_Batch(column.values.to_numpy(), column.offsets.to_numpy()))
                    self.first_tokens.append(self.first_tokens[-1] + len(column.values))
                    self.first_documents.append(self.first_documents[-1] + len(column))
        except (OSError, pa.ArrowException, KeyError) as error:
            raise _damaged(folder, path, str(error)) from error
        if self.first_tokens[-1] - first_token != record["tokens"]:
            raise _damaged(folder, path, "it has another number of tokens than index.json says")


class PreparedSplit:
    """The token stream of one split. Shards are mapped when first read; reads are O(log batches + length)."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.num_tokens: int = record["tokens"]
        self.num_documents: int = record["documents"]
        self.num_bytes: int = record["bytes"]
        self._folder, self._records = folder, record["shards"]
        self._first_tokens = [0, *itertools.accumulate(r["tokens"] for r in self._records)]
        self._first_documents = [0, *itertools.accumulate(r["documents"] for r in self._records)]
        self._shards: dict[int, _Shard] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shards": {}}  # a worker process maps the shards itself

    def read(self, start: int, length: int) -> torch.Tensor:
        """Tokens ``start`` to ``start + length`` of the stream, int64 [length]."""
        out = np.empty(length, dtype=np.int64)
        for at, batch, low, high, _ in self._pieces(start, length):
            out[at : at + high - low] = batch.tokens[low:high]
        return torch.from_numpy(out)

    def document_ids(self, start: int, length: int) -> torch.Tensor:
        """For each token of the range the number of its document in the split, int64 [length]."""
        out = np.empty(length, dtype=np.int64)
        for at, batch, low, high, first_document in self._pieces(start, length):
            row = np.searchsorted(batch.offsets, np.arange(low, high), side="right") - 1
            out[at : at + high - low] = first_document + row
        return torch.from_numpy(out)

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, int64 [documents]: reads all offsets, no token."""
        shards = map(self._shard, range(len(self._records)))
        lengths = [np.diff(batch.offsets).astype(np.int64) for shard in shards for batch in shard.batches]
        return np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, _Batch, int, int, int]]:
        """(position in the range, batch, first and last token in the batch, the batch's first document)."""
        if not 0 <= start <= start + length <= self.num_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.num_tokens}")
        at = 0
        while at < length:
            shard = self._shard(bisect_right(self._first_tokens, start + at) - 1)
            i = bisect_right(shard.first_tokens, start + at) - 1
            low = start + at - shard.first_tokens[i]
            high = min(low + length - at, len(shard.batches[i].tokens))
            yield at, shard.batches[i], low, high, shard.first_documents[i]
            at += high - low

    def _shard(self, i: int) -> _Shard:
        if i not in self._shards:
            record = self._records[i]
            self._shards[i] = _Shard(self._folder, record, self._first_tokens[i], self._first_documents[i])
        return self._shards[i]


class PreparedData:
    """A prepared folder. Opening reads the index and compares the sizes of the shards; see also
    :meth:`verify`.

    ``index`` is the content of ``index.json``; ``prepared["train"]`` and ``prepared["heldout"]`` are the
    splits. With a tokenizer, data of another one is refused. Raises :class:`UserError` where anything is
    amiss.
    """

    def __init__(self, folder: str | Path, tokenizer: "Tokenizer | None" = None) -> None:
        self.folder = Path(folder)
        self.index = self._read_index()
        self.identity: str = self.index["identity"]
        """Hash of all that the data depend on."""
        self.vocab_size: int = self.index["tokenizer"]["vocab_size"]
        self.tokenizer_fingerprint: str = self.index["tokenizer"]["fingerprint"]
        if tokenizer is not None and tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise UserError(f"{self.folder} was prepared with another tokenizer: prepare the data again")
        for record in self._shard_records():
            path = self.folder / record["file"]
            if not path.is_file() or path.stat().st_size != record["size"]:
                raise _damaged(self.folder, path, f"missing or not of {record['size']} bytes")
        self._splits = {split: PreparedSplit(self.folder, self.index["splits"][split]) for split in SPLITS}

    def __getitem__(self, split: Split) -> PreparedSplit:
        return self._splits[split]

    @property
    def num_stored_bytes(self) -> int:
        return sum(record["size"] for record in self._shard_records())

    def verify(self) -> None:
        """Compare the SHA-256 of every shard: reads all of the data."""
        for record in self._shard_records():
            if _sha256(self.folder / record["file"]) != record["sha256"]:
                raise _damaged(self.folder, self.folder / record["file"], "its checksum is not that of index.json")

    def _read_index(self) -> dict[str, Any]:
        path = self.folder / INDEX
        try:
            index: dict[str, Any] = json.loads(path.read_bytes())
            version = index["format_version"]
            if version == FORMAT_VERSION:
                _check_index(index)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"{self.folder}: no prepared data here ({INDEX} is missing)") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(self.folder, path, f"{type(error).__name__}: {error}") from error
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {version}, and this program reads {FORMAT_VERSION}: "
                "delete the folder and prepare the data again"
            )
        return index

    def verify_if_small(self) -> None:
        """:meth:`verify`, where that takes seconds."""
        if self.num_stored_bytes < _VERIFY_BELOW:
            self.verify()

    def _shard_records(self) -> Iterator[dict[str, Any]]:
        return (record for split in SPLITS for record in self.index["splits"][split]["shards"])


def bits_per_byte(splits: Sequence[PreparedSplit], nats_per_token: float, num_tokens: int) -> float:
    """The loss of the ``num_tokens`` that were scored, as bits per byte of the text of ``splits``."""
    return nats_per_token * num_tokens / (math.log(2) * sum(split.num_bytes for split in splits))


def _check_index(index: dict[str, Any]) -> None:
    """Whether all is there that is read later.

    Raises:
        KeyError, TypeError, ValueError: something is not.
    """
    for name in ("identity", "policy", "holdout", "skipped_rows"):
        index[name]
    int(index["tokenizer"]["vocab_size"]), index["tokenizer"]["fingerprint"]
    for split in SPLITS:
        record = index["splits"][split]
        for kind in ("documents", "tokens", "bytes"):
            if sum(shard[kind] for shard in record["shards"]) != record[kind]:
                raise ValueError(f"the {kind} of the {split} split are not those of its shards")
        for shard in record["shards"]:
            Path(shard["file"]), int(shard["size"]), shard["sha256"]


def _damaged(folder: Path, path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged ({what}); delete the folder {folder} and prepare the data again")
