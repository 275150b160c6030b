"""Where text comes from: files on disk, or the corpus embedded in Python itself.

Plain text (``.txt``: one document a file), JSON lines (``.jsonl`` or ``.json``: one object a line, blank
lines ignored), each also compressed (``.gz``, ``.zst``), and Parquet. Whatever cannot be read exactly is a
:class:`~llmstack.errors.UserError` that names ``file:line`` (``file:row`` in Parquet): no row is skipped
silently.
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

Source = str | Path | Sequence[str | Path]
"""``"embedded"``, or a path, glob or folder, or several of them."""

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_PLAIN = (".txt", ".jsonl", ".json")
SUFFIXES = (*_PLAIN, *(kind + packed for kind in _PLAIN for packed in _COMPRESSION), ".parquet")


@dataclass(frozen=True)
class Document:
    """A text, where it was found (``file:line``), and the unit by which the held-out split takes it."""

    text: str
    where: str
    unit: Literal["document", "section"]


def resolve_files(spec: Source) -> list[Path]:
    """The files that paths, globs and folders mean: absolute, sorted by path, each once.

    A folder stands for every file below it that has a known suffix, hidden ones apart.
    """
    found: set[Path] = set()
    for entry in [spec] if isinstance(spec, str | Path) else spec:
        path = Path(os.path.abspath(os.path.expanduser(entry)))
        if path.is_dir():
            matches = [p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file()]
            matches = [p for p in matches if not any(s.startswith(".") for s in p.relative_to(path).parts)]
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
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: unknown suffix; known are {_known()}")
    return sorted(unique.values())


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
    """Documents of a source, file after file in the order of :func:`resolve_files`."""
    if source == EMBEDDED:
        yield from embedded_documents()
        return
    for path in resolve_files(source):
        try:
            yield from _read(path, text_field)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error}); is the file complete?") from error


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


def _read(path: Path, text_field: str) -> Iterator[Document]:
    if path.stat().st_size == 0:
        raise UserError(f"{path}: empty file")
    if path.suffix == ".parquet":
        return _read_parquet(path, text_field)
    import pyarrow as pa

    # Arrow's stream, unlike zstandard's, reports a truncated file instead of ending early.
    stream = pa.input_stream(str(path), compression=_COMPRESSION.get(path.suffix))
    lines = io.BufferedReader(stream, 1 << 20)  # type: ignore[arg-type, type-var, unused-ignore]
    kind = path.with_suffix("").suffix if path.suffix in _COMPRESSION else path.suffix
    return _read_text(path, lines) if kind == ".txt" else _read_json_lines(path, lines, text_field)


def _read_text(path: Path, file: io.BufferedReader) -> Iterator[Document]:
    with file:
        raw = file.read().removeprefix(codecs.BOM_UTF8)
    if not raw:
        raise UserError(f"{path}: empty file")
    try:
        yield Document(raw.decode("utf-8"), f"{path}:1", "section")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason}); convert the file") from error


def _read_json_lines(path: Path, file: io.BufferedReader, text_field: str) -> Iterator[Document]:
    empty = True
    with file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace() or not line:
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 ({error.reason}); convert the file") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: bad JSON ({error}); one object a line is expected") from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: a JSON object is expected, not {type(row).__name__}")
            yield Document(_checked(row.get(text_field), where, text_field), where, "document")
            empty = False
    if empty:
        raise UserError(f"{path}: empty file")


def _read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                raise UserError(f"{path}: no column {text_field!r}; it has {', '.join(columns)}")
            for batch in file.iter_batches(1024, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    where = f"{path}:{row}"
                    yield Document(_checked(value.as_py(), where, text_field), where, "document")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{row}: not UTF-8 ({error.reason}); convert the file") from error
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); is it complete?") from error
    if row == 0:
        raise UserError(f"{path}: empty file")


def _checked(text: object, where: str, text_field: str) -> str:
    if not isinstance(text, str):
        found = "missing or null" if text is None else f"of type {type(text).__name__}"
        raise UserError(f"{where}: the text in field {text_field!r} is {found}; a string is expected")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text is not valid Unicode ({error.reason})") from error
    return text


def _known() -> str:
    return ".txt, .jsonl, .json (each also .gz or .zst), .parquet"
