"""From a source to prepared data: tokenise once, find it ever after.

Two passes over the units of the source, each in any number of processes: the first counts, finds bad rows and chooses
what is held out, the second tokenises. A unit that is done stays done when the process is killed, and the result does
not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Protocol

from llmstack.checkpoint.files import failing_in_one_line, sync_folder, write_atomically
from llmstack.data.holdout import (
    RULE,
    Holdout,
    SmallestHashes,
    Split,
    choose_documents,
    choose_holdout,
    hold_out_all,
    mixed,
    text_hash,
)
from llmstack.data.prepared import (
    FORMAT_VERSION,
    SKIPPED,
    SPLITS,
    TOKENIZER,
    UNITS,
    PreparedData,
    ShardWriter,
    Unfinished,
    growing_folder,
    write_index,
)
from llmstack.data.sources import EMBEDDED, BadRow, Document, Source, describe_source
from llmstack.data.units import UNIT_BYTES, Unit, cut_units
from llmstack.errors import UserError
from llmstack.processes import end_with_parent
from llmstack.store import cache_root

if TYPE_CHECKING:
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

MAX_BAD_SHARE = 0.01
_ENCODE_CHARACTERS = 1 << 20  # text handed to the tokenizer at once
_PLAN = "plan.json"
_RECORD = "unit.json"

Report = Callable[[str], None]


def print_report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def prepare_source(
    source: Source,
    tokenizer: Tokenizer,
    policy: BosEosPolicy,
    text_field: str = "text",
    heldout: Source | None = None,
    out: Path | None = None,
    num_proc: int = 1,
    max_bad_share: float = MAX_BAD_SHARE,
    report: Report = print_report,
    unit_bytes: int = UNIT_BYTES,
) -> PreparedData:
    """The prepared data of a source, tokenised now or found where an earlier start put it.

    Args:
        source: ``"embedded"``, or files, globs and folders; none, where only ``heldout`` is wanted.
        tokenizer: makes the ids, and goes with the data.
        policy: BOS and EOS around each document.
        text_field: the field of JSON lines, the column of Parquet.
        heldout: files that are the held-out split; none: a part of the source.
        out: the folder to make; none: one in the cache.
        num_proc: processes; a single one uses the threads of the tokenizer's library.
        max_bad_share: share of bad rows up to which they are skipped, counted and listed.
        report: receives a line of progress every few seconds of long work, and what was skipped.
        unit_bytes: size of a unit of work in bytes of the source.

    Raises:
        UserError: no such source, too many bad rows, too little text, other data in ``out``.
    """
    if out is not None:
        _check_apart(out, source)
    sources = describe_source(source)
    held_out = None if heldout is None else describe_source(heldout)
    key = {
        "format_version": FORMAT_VERSION,
        "sources": sources,
        "text_field": text_field,
        "tokenizer": tokenizer.fingerprint,
        "policy": policy.to_dict(),
        "holdout": RULE if held_out is None else held_out,
        "unit_bytes": unit_bytes,
    }
    identity = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_root() / identity[:32] if out is None else out
    fresh = False
    if not path.exists():
        with failing_in_one_line(path.parent), growing_folder(path, identity) as folder:
            if fresh := folder is not None:
                work = _Work(folder, tokenizer, policy, text_field)
                progress = _Progress(report)
                _prepare(work, source, sources, held_out, identity, num_proc, max_bad_share, progress, unit_bytes)
    prepared = PreparedData(path, tokenizer)
    if prepared.identity != identity:
        raise UserError(f"{path}: holds other prepared data; give a new folder, or delete this one")
    if not fresh:
        prepared.verify_if_small()
    if num_skipped := prepared.index["skipped_rows"]:
        report(f"prepare: {num_skipped:,} bad rows were skipped; {path / SKIPPED} lists them")
    return prepared


def _check_apart(out: Path, source: Source) -> None:
    """What is made must not become a part of what it is made from."""
    for entry in [source] if isinstance(source, str | Path) else source:
        if Path(entry).is_dir() and out.resolve().is_relative_to(Path(entry).resolve()):
            raise UserError(f"{out} lies in the source folder {entry}: choose a place outside of it")


def _prepare(
    work: _Work,
    source: Source,
    sources: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None,
    identity: str,
    num_proc: int,
    max_bad_share: float,
    progress: _Progress,
    unit_bytes: int,
) -> None:
    """Fill the folder of ``work``, in which units may be finished already."""
    units = _units(source, sources, held_out, unit_bytes)
    plan = work.folder / _PLAN
    if not plan.is_file():
        surveys = list(_each(work, "survey", units, num_proc, progress))
        _check_rows(surveys, max_bad_share)
        chosen = _choose(units, surveys, work, held_out is not None)
        total = sum(survey.num_bytes for survey in surveys)
        write_atomically(plan, json.dumps({"holdout": chosen.to_dict(), "bytes": total}))
    planned = json.loads(plan.read_text())
    work = replace(work, holdout=Holdout.from_dict(planned["holdout"]))
    (work.folder / UNITS).mkdir(exist_ok=True)
    for partial in (work.folder / UNITS).glob("*.partial-*"):
        rmtree(partial)
    records = {unit.number: record for unit in units if (record := work.finished(unit)) is not None}
    if records:
        progress.report(f"prepare: {len(records)} of {len(units)} units are there from an earlier start")
    progress.expect(planned["bytes"] - sum(record["bytes"] for record in records.values()))
    left = [unit for unit in units if unit.number not in records]
    for record in _each(work, "tokenise", left, num_proc, progress):
        records[record["unit"]] = record
    wanted = {split for unit in units for split in unit.splits}
    _finish(work, [records[unit.number] for unit in units], wanted, sources, held_out, identity)


def _units(
    source: Source, sources: list[dict[str, Any]], held_out: list[dict[str, Any]] | None, unit_bytes: int
) -> list[Unit]:
    """Of the described files, so that all passes read the same ones; those that are held out come last."""
    if source == EMBEDDED:
        return [Unit(0, (), SPLITS)]
    parts: list[tuple[list[dict[str, Any]], tuple[Split, ...]]] = [(sources, SPLITS)]
    if held_out is not None:
        parts = [(sources, ("train",)), (held_out, ("heldout",))]
    units = list[Unit]()
    for described, splits in parts:
        for pieces in cut_units([Path(entry["path"]) for entry in described], unit_bytes):
            units.append(Unit(len(units), pieces, splits))
    return units


def _check_rows(surveys: Sequence[_Survey], max_bad_share: float) -> None:
    bad = sum(survey.num_bad for survey in surveys)
    total = bad + sum(survey.num_documents for survey in surveys)
    first = next((survey.first_bad for survey in surveys if survey.first_bad is not None), None)
    if first is not None and bad > max_bad_share * total:
        raise UserError(
            f"{bad:,} of {total:,} rows are bad, more than a share of {max_bad_share:g}; the first is {first.where}: "
            f"{first.reason}"
        )


def _choose(units: Sequence[Unit], surveys: Sequence[_Survey], work: _Work, is_given: bool) -> Holdout:
    """What is held out of all units, or all of those that are held out."""
    kinds: dict[str, str] = {}
    for survey in surveys:
        kinds = survey.kinds | kinds
    if len(kinds) > 1:
        raise mixed(*kinds.values())
    if is_given:
        return hold_out_all(_documents([unit for unit in units if unit.splits == ("heldout",)], work.text_field))
    if "document" not in kinds:
        return choose_holdout(lambda: _documents(units, work.text_field), work.tokenizer)
    hashes = SmallestHashes()
    for survey in surveys:
        hashes.merge(survey.hashes)
    return choose_documents(hashes)


def _documents(units: Iterable[Unit], text_field: str) -> Iterator[Document]:
    return (row for unit in units for row in unit.rows(text_field) if isinstance(row, Document))


def _finish(
    work: _Work,
    records: Sequence[dict[str, Any]],
    wanted: set[Split],
    sources: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None,
    identity: str,
) -> None:
    """Put the units together: rows that were skipped, tokenizer, index."""
    shards: dict[Split, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for record in records:
        for split in SPLITS:
            shards[split] += record["shards"][split]
    for split in SPLITS:
        if split in wanted and not shards[split]:
            raise UserError(f"no text is left for the {split} split: all of the source stands in the held-out files")
    for described in (sources, held_out or []):
        files = [entry["path"] for entry in described if "path" in entry]
        if files and describe_source(files) != described:
            raise UserError("a source file changed while it was being prepared: start again when it is complete")
    skipped = [row for record in records for row in record["skipped"]]
    write_atomically(work.folder / SKIPPED, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in skipped))
    work.tokenizer.save(work.folder / TOKENIZER, work.policy)
    rule = RULE if held_out is None else held_out
    assert work.holdout is not None
    write_index(work.folder, identity, shards, work.tokenizer, work.policy, sources, work.holdout, rule, len(skipped))
    (work.folder / _PLAN).unlink()


class Counter(Protocol):
    """Is told of what was done."""

    def add(self, documents: int, num_bytes: int, tokens: int) -> None: ...


@dataclass
class _Survey:
    """What the first pass finds in a unit."""

    kinds: dict[str, str] = field(default_factory=dict)
    """Units of text by which documents are held out, and where the first of each stands."""
    hashes: SmallestHashes = field(default_factory=SmallestHashes)
    num_documents: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    first_bad: BadRow | None = None


@dataclass(frozen=True)
class _Work:
    """What is done with each unit, in this or another process."""

    folder: Path
    tokenizer: Tokenizer
    policy: BosEosPolicy
    text_field: str
    holdout: Holdout | None = None

    def survey(self, unit: Unit, counter: Counter) -> _Survey:
        """Read a unit without tokenising it."""
        survey = _Survey()
        documents = num_bytes = 0
        for row in unit.rows(self.text_field):
            if isinstance(row, BadRow):
                survey.num_bad += 1
                survey.first_bad = survey.first_bad or row
                continue
            survey.kinds.setdefault(row.unit, row.where)
            if row.unit == "document":
                survey.hashes.add(text_hash(row.text))
            documents, num_bytes = documents + 1, num_bytes + len(row.text.encode())
            if documents % 1024 == 0:
                counter.add(1024, 0, 0)
        survey.num_documents, survey.num_bytes = documents, num_bytes
        return survey

    def finished(self, unit: Unit) -> dict[str, Any] | None:
        """What an earlier start has left of a unit."""
        path = self._place(unit) / _RECORD
        return json.loads(path.read_text()) if path.is_file() else None

    def tokenise(self, unit: Unit, counter: Counter) -> dict[str, Any]:
        """Write the shards of a unit, and its record, which makes it finished."""
        place = self._place(unit)
        partial = place.with_name(f"{place.name}.partial-{os.getpid()}")
        rmtree(partial, ignore_errors=True)
        partial.mkdir()
        writers = {split: ShardWriter(partial, split, self.tokenizer.vocab_size) for split in unit.splits}
        skipped, total = list[dict[str, str]](), 0
        for group in _groups(self._parts(unit, skipped)):
            encoded = self.tokenizer.encode_batch([part.text for part in group])
            num_bytes = [len(part.text.encode()) for part in group]
            for part, ids, size in zip(group, encoded, num_bytes, strict=True):
                ends = replace(self.policy, bos=self.policy.bos and part.first, eos=self.policy.eos and part.last)
                writers[part.split].add(ends.wrap(ids, self.tokenizer), size, end=part.last)
            total += sum(num_bytes)
            counter.add(sum(part.last for part in group), sum(num_bytes), sum(map(len, encoded)))
        shards: dict[Split, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for split, writer in writers.items():
            writer.close()
            name = f"{UNITS}/{place.name}"
            shards[split] = [shard | {"file": f"{name}/{shard['file']}"} for shard in writer.shards]
        record = {"unit": unit.number, "bytes": total, "shards": shards, "skipped": skipped}
        write_atomically(partial / _RECORD, json.dumps(record))
        partial.rename(place)
        sync_folder(place.parent)
        return record

    def _place(self, unit: Unit) -> Path:
        return self.folder / UNITS / f"{unit.number:05d}"

    def _parts(self, unit: Unit, skipped: list[dict[str, str]]) -> Iterator[_Part]:
        assert self.holdout is not None
        for row in unit.rows(self.text_field):
            if isinstance(row, BadRow):
                skipped.append({"where": row.where, "reason": row.reason})
                continue
            for split, texts in self.holdout.divide(row):
                for i, text in enumerate(texts if split in unit.splits else ()):
                    yield _Part(split, text, first=i == 0, last=i == len(texts) - 1)


@dataclass(frozen=True)
class _Part:
    """A text tokenised by itself: a document's part in a split, or a section (the first, the last?) of it."""

    split: Split
    text: str
    first: bool
    last: bool


def _groups(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    group, size = list[_Part](), 0
    for part in parts:
        group.append(part)
        size += len(part.text)
        if size >= _ENCODE_CHARACTERS or len(group) >= 4096:
            yield group
            group, size = [], 0
    if group:
        yield group


# ------------------------------------------------------------------------------------------- processes


def _each(work: _Work, task: str, units: Sequence[Unit], num_proc: int, progress: _Progress) -> Iterator[Any]:
    """What ``task`` of ``work`` returns for each of ``units``: in order here, as they end from other processes."""
    progress.begin(task)
    if num_proc == 1 or len(units) <= 1:
        for unit in units:
            yield getattr(work, task)(unit, progress)
        return
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 3)
    # In a file: what is too long for a pipe would be waited for by this process alone if a new one died at once.
    packed = work.folder / ".work"
    packed.write_bytes(pickle.dumps(work))
    with ProcessPoolExecutor(
        min(num_proc, len(units)), context, initializer=_start, initargs=(packed, counts, os.getpid())
    ) as pool:
        with _not_interrupted():
            pending = {pool.submit(_do, task, unit) for unit in units}
        try:
            while pending:
                done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                progress.show(*counts[:])
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise Unfinished(
                "prepare: a process was killed, perhaps for want of memory: start again, with a smaller --num-proc; "
                "what is finished is kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
            packed.unlink()


class _SharedCounter:
    """Adds to numbers that the parent process reads."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def add(self, documents: int, num_bytes: int, tokens: int) -> None:
        with self._counts.get_lock():
            for i, value in enumerate((documents, num_bytes, tokens)):
                self._counts[i] += value


_in_worker: list[Any] = []
"""In a process of the pool: its work and its counter."""


@contextmanager
def _not_interrupted() -> Iterator[None]:
    """Processes that are started inside leave Ctrl-C to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(packed: Path, counts: Any, parent: int) -> None:
    end_with_parent(parent)
    _in_worker[:] = pickle.loads(packed.read_bytes()), _SharedCounter(counts)


def _do(task: str, unit: Unit) -> Any:
    work, counter = _in_worker
    return getattr(work, task)(unit, counter)


class _Progress:
    """A line every five seconds, the first after two."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._expected: int | None = None
        self.begin("survey")

    def begin(self, task: str) -> None:
        """Count from zero."""
        self._task = task
        self._start = time.monotonic()
        self._next = self._start + 2
        self._counts = [0, 0, 0]

    def expect(self, num_bytes: int) -> None:
        """How many bytes of text are to be tokenised."""
        self._expected = num_bytes

    def add(self, documents: int, num_bytes: int, tokens: int) -> None:
        """Count what was done in this process."""
        self.show(*(have + more for have, more in zip(self._counts, (documents, num_bytes, tokens), strict=True)))

    def show(self, documents: int, num_bytes: int, tokens: int) -> None:
        """Say, if it is time, what was done by all."""
        self._counts = [documents, num_bytes, tokens]
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 5
        if self._task == "survey":
            self.report(f"prepare: {documents:,} documents looked at")
            return
        rate = num_bytes / (now - self._start)
        line = f"prepare: {documents:,} documents, {tokens:,} tokens, {rate / 1e6:.1f} MB/s of text"
        if self._expected is not None and rate > 0:
            seconds = round(max(self._expected - num_bytes, 0) / rate)
            line += f", {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
        self.report(line)
