"""Where text comes from: files on disk, or the corpus embedded in Python itself.

Plain text (``.txt``: one document a file), JSON lines (``.jsonl`` or ``.json``: one object a line, blank
lines ignored), each also compressed (``.gz``, ``.zst``), Parquet, and Arrow as ``datasets`` saves it. A row that
cannot be read exactly is a :class:`BadRow` that names ``file:line`` (``file:row`` in Parquet and Arrow); a file
that cannot, a :class:`~llmstack.errors.UserError`. Nothing is skipped silently.
"""

import codecs
import glob
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmstack.errors import UserError

EMBEDDED = "embedded"
"""The name that stands for the embedded corpus where files are expected."""

EMPTY = "the text is empty"
"""Why a row without a character is bad: it would teach that a document may end where it begins."""

Source = str | Path | Sequence[str | Path]
"""``"embedded"``, or a path, glob or folder, or several of them."""

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_PLAIN = (".txt", ".jsonl", ".json")
_SPLITS_FILE = "dataset_dict.json"  # of datasets.DatasetDict.save_to_disk
_STATE_FILE = "state.json"  # of datasets.Dataset.save_to_disk: which files the rows are in
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # with which an Arrow stream ends
SUFFIXES = (*_PLAIN, *(kind + packed for kind in _PLAIN for packed in _COMPRESSION), ".parquet", ".arrow")


@dataclass(frozen=True)
class Document:
    """A text, where it was found (``file:line``), and the unit by which the held-out split takes it."""

    text: str
    where: str
    unit: Literal["document", "section"]


@dataclass(frozen=True)
class BadRow:
    """A row that holds no text, where it was found, and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class Piece:
    """A file, or rows of it: bytes ``start`` to ``stop`` of JSON lines, those row groups of Parquet."""

    path: Path
    start: int = 0
    stop: int | None = None
    """Where the piece ends; None: at the end of the file. A line belongs to the piece in which it starts."""

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None


def resolve_files(spec: Source) -> list[Path]:
    """The files that paths, globs and folders mean: absolute, sorted by path, each once.

    A folder stands for every file below it that has a known suffix, hidden ones apart.
    """
    found: set[Path] = set()
    for entry in [spec] if isinstance(spec, str | Path) else spec:
        if not str(entry):
            raise UserError("an empty name is no file, glob or folder")
        path = Path(os.path.abspath(os.path.expanduser(entry)))
        if path.is_dir():
            matches = _files_below(path)
        elif path.is_file():
            matches = [path]
        else:
            matches = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
        if not matches:
            raise UserError(f"no file matches {str(entry)!r}: give a file, a glob or a folder with {_known()}")
        found.update(matches)
    # One file reached by two names (a link, say) is read once; the name is kept, for a hub cache links
    # `x.jsonl` to a blob without suffix.
    unique = {path.resolve(): path for path in sorted(found, reverse=True)}
    for path in unique.values():
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{str(path)!a}: the name is not UTF-8; rename the file") from error
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: unknown suffix; known are {_known()}")
    return sorted(unique.values())


def _files_below(folder: Path) -> list[Path]:
    """What a folder stands for: of a set that ``datasets`` saved its own files, elsewhere those of a known suffix."""
    entries = list(folder.rglob("*"))
    for path in entries:
        if path.name == _SPLITS_FILE:
            _refuse_folder_of_splits(path.parent)
    saved = {path.parent: _files_of_saved_set(path) for path in entries if path.name == _STATE_FILE}
    matches = [path for path in entries if path.name.endswith(SUFFIXES) and path.is_file()]
    matches = [path for path in matches if not any(s.startswith(".") for s in path.relative_to(folder).parts)]
    return [path for path in matches if path.name in (saved.get(path.parent) or [path.name])]


def _refuse_folder_of_splits(folder: Path) -> None:
    """All splits of a set together would train on what is for testing."""
    splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
    raise UserError(f"{folder} holds the splits {', '.join(splits)}: give the folder of one")


def _files_of_saved_set(state: Path) -> list[str] | None:
    """Names of the files that a saved set consists of, older ones and caches beside them apart; None: it is no set."""
    try:
        return [str(file["filename"]) for file in json.loads(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_source(source: Source) -> list[dict[str, Any]]:
    """What identifies a source without reading it: path, size, mtime of each file (embedded: its content)."""
    if source == EMBEDDED:
        digest = hashlib.sha256()
        for document in embedded_documents():
            digest.update(f"{document.where}\0{document.text}\0".encode())
        return [{"embedded": digest.hexdigest()}]
    stats = [(path, path.stat()) for path in resolve_files(source)]
    return [{"path": str(path), "size": s.st_size, "mtime_ns": s.st_mtime_ns} for path, s in stats]


def iterate_documents(source: Source, text_field: str = "text") -> Iterator[Document]:
    """Documents of a source, file after file in the order of :func:`resolve_files`.

    A bad row is an error, unless its text is merely empty.
    """
    if source == EMBEDDED:
        yield from embedded_documents()
        return
    for path in resolve_files(source):
        for row in read_rows(Piece(path), text_field):
            if not isinstance(row, BadRow):
                yield row
            elif row.reason == EMPTY:
                yield Document("", row.where, "document")
            else:
                raise UserError(f"{row.where}: {row.reason}")


def read_rows(piece: Piece, text_field: str = "text") -> Iterator[Document | BadRow]:
    """What stands in a file, or in a part of it, row by row."""
    try:
        yield from _read(piece, text_field)
    except OSError as error:
        raise UserError(f"{piece.path}: cannot be read ({error}); is the file complete?") from error


def embedded_documents() -> Iterator[Document]:
    """The embedded corpus: the Python language reference inside CPython, sorted by topic.

    A topic is left out where a longer one has most of it ("while" is in "compound"): of about 465 kB a fifth is
    said twice, and held-out text would stand in the training split as well. About 375 kB remain.
    """
    from pydoc_data.topics import topics

    paragraphs = {name: {part.strip() for part in text.split("\n\n")} for name, text in topics.items()}

    def is_mostly_in(name: str, other: str) -> bool:
        shared = paragraphs[name] & paragraphs[other]
        return 2 * sum(map(len, shared)) > sum(map(len, paragraphs[name]))

    for name, text in sorted(topics.items()):
        longer = (other for other in topics if len(topics[other]) > len(text))
        if not any(is_mostly_in(name, other) for other in longer):
            yield Document(text, f"pydoc_data.topics:{name}", "section")


def _read(piece: Piece, text_field: str) -> Iterator[Document | BadRow]:
    path = piece.path
    if path.stat().st_size == 0:
        raise UserError(f"{path}: empty file")
    if path.suffix == ".parquet":
        return _read_parquet(piece, text_field)
    if path.suffix == ".arrow":
        return _read_arrow(path, text_field)
    kind = path.with_suffix("").suffix if path.suffix in _COMPRESSION else path.suffix
    return _read_text(path) if kind == ".txt" else _read_json_lines(piece, text_field)


def _open(path: Path) -> io.BufferedReader:
    import pyarrow as pa

    # Arrow's stream, unlike zstandard's, reports a truncated file instead of ending early.
    stream = pa.input_stream(str(path), compression=_COMPRESSION.get(path.suffix))
    return io.BufferedReader(stream, 1 << 20)  # type: ignore[arg-type, type-var, unused-ignore]


def _read_text(path: Path) -> Iterator[Document]:
    with _open(path) as file:
        raw = file.read().removeprefix(codecs.BOM_UTF8)
    if not raw:
        raise UserError(f"{path}: empty file")
    try:
        yield Document(raw.decode("utf-8"), f"{path}:1", "section")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason}); convert the file") from error


def _read_json_lines(piece: Piece, text_field: str) -> Iterator[Document | BadRow]:
    empty, at = True, piece.start
    with _open(piece.path) if piece.is_whole else piece.path.open("rb") as file:
        if at > 0:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        for number, line in enumerate(file, start=1):
            if piece.stop is not None and at >= piece.stop:
                break
            at += len(line)
            if number == 1 and piece.start == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace() or not line:
                continue
            empty = False
            text = _text_of_line(line, text_field)
            if isinstance(text, _Bad):
                yield BadRow(f"{piece.path}:{_lines_before(piece) + number}", text.reason)
            else:
                # Counting the lines of a long file would be worth its while only for a row that is bad.
                yield Document(text, f"{piece.path}:{number}" if piece.start == 0 else str(piece.path), "document")
    if empty and piece.is_whole:
        raise UserError(f"{piece.path}: empty file")


@dataclass(frozen=True)
class _Bad:
    reason: str


def _text_of_line(line: bytes, text_field: str) -> str | _Bad:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _Bad(f"not UTF-8 ({error.reason})")
    except (ValueError, RecursionError) as error:
        return _Bad(f"bad JSON ({error}); one object a line is expected")
    if not isinstance(row, dict):
        return _Bad(f"a JSON object is expected, not {type(row).__name__}")
    return _checked(row.get(text_field), text_field)


def _lines_before(piece: Piece) -> int:
    """Lines of the file that start before the piece's first."""
    count, left = 0, piece.start
    with piece.path.open("rb") as file:
        while left > 0:
            block = file.read(min(left, 1 << 20))
            count, left = count + block.count(b"\n"), left - len(block)
        if piece.start > 0 and not block.endswith(b"\n"):
            count += 1  # the line that the border cuts belongs to the piece before
    return count


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Rows and bytes of each row group of a Parquet file."""
    with _parquet(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); is it complete?") from error


def _read_parquet(piece: Piece, text_field: str) -> Iterator[Document | BadRow]:
    import pyarrow as pa

    path = piece.path
    with _parquet(path) as file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise UserError(f"{path}: no column {text_field!r}; it has {', '.join(columns)}")
        metadata = file.metadata
        if metadata.num_rows == 0:
            raise UserError(f"{path}: empty file")
        groups = range(piece.start, metadata.num_row_groups if piece.stop is None else piece.stop)
        row = sum(metadata.row_group(i).num_rows for i in range(piece.start))
        try:
            for batch in file.iter_batches(1024, row_groups=list(groups), columns=[text_field]):
                yield from _rows_of_column(batch.column(0), path, row, text_field)
                row += len(batch)
        except pa.ArrowInvalid as error:
            raise UserError(f"{path}: not a readable Parquet file ({error}); is it complete?") from error


def _read_arrow(path: Path, text_field: str) -> Iterator[Document | BadRow]:
    from datasets import Dataset

    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - len(_END_OF_STREAM), 0))
        if file.read() != _END_OF_STREAM:
            raise UserError(f"{path}: not an Arrow stream with its end; is it complete?")
    try:
        rows = Dataset.from_file(str(path))
    except Exception as error:  # of whatever kind, by what is damaged or not known to the library
        raise UserError(f"{path}: datasets cannot read it ({' '.join(str(error).split())})") from error
    if text_field not in rows.column_names:
        raise UserError(f"{path}: no column {text_field!r}; it has {', '.join(rows.column_names)}")
    if len(rows) == 0:
        raise UserError(f"{path}: empty file")
    row = 0
    for table in rows.with_format("arrow").iter(1024):
        yield from _rows_of_column(table.column(text_field), path, row, text_field)
        row += len(table)


def _rows_of_column(column: Any, path: Path, before: int, text_field: str) -> Iterator[Document | BadRow]:
    for number, value in enumerate(column, start=before + 1):
        text, where = _text_of_value(value, text_field), f"{path}:{number}"
        yield BadRow(where, text.reason) if isinstance(text, _Bad) else Document(text, where, "document")


def _text_of_value(value: Any, text_field: str) -> str | _Bad:
    try:
        return _checked(value.as_py(), text_field)
    except UnicodeDecodeError as error:
        return _Bad(f"not UTF-8 ({error.reason})")


def _checked(text: object, text_field: str) -> str | _Bad:
    if text == "":
        return _Bad(EMPTY)
    if not isinstance(text, str):
        found = "missing or null" if text is None else f"of type {type(text).__name__}"
        return _Bad(f"the text in field {text_field!r} is {found}; a string is expected")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return _Bad(f"the text is not valid Unicode ({error.reason})")
    return text


def _known() -> str:
    return ".txt, .jsonl, .json (each also .gz or .zst), .parquet, .arrow"
