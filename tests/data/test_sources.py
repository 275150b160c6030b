"""Every kind of file gives the texts exactly, and whatever is wrong is named by file and line."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from llmstack.data import Document, iterate_documents, resolve_files
from llmstack.data.sources import BadRow, Piece, embedded_documents, read_rows
from llmstack.errors import UserError

# Characters that str.splitlines takes for line ends, CRLF, a null, an emoji outside the BMP.
TEXTS = ["one\u2028line\x0b\x0c\x85", "two\r\nlines\n", "zero\0", "smile \U0001f600", " ", ""]


def zstd(raw: bytes) -> bytes:
    half = len(raw) // 2  # two frames, as parallel compressors write
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (raw[:half], raw[half:]))


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def json_lines(texts: list[str], ascii_only: bool) -> bytes:
    return "".join(json.dumps({"n": 1, "text": t}, ensure_ascii=ascii_only) + "\n" for t in texts).encode()


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines_give_the_texts(tmp_path: Path, suffix: str, packed: str, ascii_only: bool) -> None:
    path = tmp_path / f"a{suffix}{packed}"
    path.write_bytes(PACK[packed](json_lines(TEXTS, ascii_only)))
    expected = [Document(text, f"{path}:{i}", "document") for i, text in enumerate(TEXTS, start=1)]
    assert list(iterate_documents(path)) == expected


@pytest.mark.parametrize("packed", PACK)
def test_plain_text_is_one_document(tmp_path: Path, packed: str) -> None:
    text = "".join(TEXTS)
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(PACK[packed](text.encode()))
    assert list(iterate_documents(path)) == [Document(text, f"{path}:1", "section")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_the_texts(tmp_path: Path, kind: pa.DataType) -> None:
    texts = TEXTS * 500  # several batches and row groups
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(len(texts)), "text": pa.array(texts).cast(kind)}), path, row_group_size=700)
    documents = list(iterate_documents(path))
    assert [document.text for document in documents] == texts
    assert documents[1500].where == f"{path}:1501"


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert [document.text for document in iterate_documents(tmp_path)] == ["hello", "hello"]


def test_another_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1, "content": "yes"}\n')
    assert [document.text for document in iterate_documents(tmp_path, "content")] == ["yes"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "bad JSON"),
        (b"[" * 100_000, "bad JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": null}', "missing or null"),
        (b'{"body": "x"}', "missing or null"),
        (b'{"text": 3}', "of type int"),
        (b'["text"]', "object is expected"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
@pytest.mark.parametrize("packed", PACK)
def test_bad_row_is_named(tmp_path: Path, packed: str, line: bytes, message: str) -> None:
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(PACK[packed](b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n'))
    with pytest.raises(UserError, match=f"{path}:3: .*{message}"):
        list(iterate_documents(path))


def test_bad_utf8_in_plain_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\ngood\nbad \xc3\n")
    with pytest.raises(UserError, match=f"{path}:3: not UTF-8"):
        list(iterate_documents(path))


def test_bad_parquet_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 1500 + [None]}), path)
    with pytest.raises(UserError, match=f"{path}:1501: .*missing or null"):
        list(iterate_documents(path))
    with pytest.raises(UserError, match="no column 'body'; it has text"):
        list(iterate_documents(path, "body"))


def test_what_datasets_saved_gives_its_texts(tmp_path: Path) -> None:
    """Shard after shard; of a set with several splits one has to be chosen, as all would be trained on."""
    texts = [*[text or "full" for text in TEXTS] * 800, None]
    rows = Dataset.from_dict({"n": range(len(texts)), "text": texts})
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    read = [row for path in resolve_files(tmp_path / "one") for row in read_rows(Piece(path))]
    assert [row.text for row in read if isinstance(row, Document)] == texts[:-1]
    assert isinstance(read[-1], BadRow)
    assert read[-1].where.endswith(f"data-00001-of-00002.arrow:{len(texts) // 2}")
    with pytest.raises(UserError, match="no column 'body'; it has n, text"):
        list(iterate_documents(tmp_path / "one", "body"))
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match="holds the splits test, train: give the folder of one"):
        resolve_files(tmp_path / "both")
    assert len(resolve_files(tmp_path / "both" / "train")) == 1
    with pytest.raises(UserError, match="both holds the splits"):
        resolve_files(tmp_path)
    # What another save or a cache has left beside the rows is not part of the set.
    (tmp_path / "one" / "cache-1.arrow").write_bytes((tmp_path / "one" / "data-00000-of-00002.arrow").read_bytes())
    Dataset.from_dict({"text": ["new"]}).save_to_disk(tmp_path / "one")
    assert [row.text for row in iterate_documents(tmp_path / "one")] == ["new"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst", "a.parquet", "a.arrow"])
def test_truncated_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = [f"{i * 7919 % 10_007} text" for i in range(5000)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": rows}), path)
    elif path.suffix == ".arrow":
        Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "set")
        path.write_bytes(next((tmp_path / "set").glob("*.arrow")).read_bytes())
    else:
        path.write_bytes(PACK[path.suffix](json_lines(rows, True)))
    raw = path.read_bytes()
    for length in (len(raw) // 3, len(raw) - 5):
        path.write_bytes(raw[:length])
        with pytest.raises(UserError, match=f"{path}"):
            list(iterate_documents(path))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt.zst", "a.arrow"])
def test_empty_file_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match="empty file"):
        list(iterate_documents(tmp_path))


@pytest.mark.parametrize("packed", PACK)
def test_file_without_rows_is_an_error(tmp_path: Path, packed: str) -> None:
    (tmp_path / f"a.jsonl{packed}").write_bytes(PACK[packed](b"\n \n"))
    with pytest.raises(UserError, match="empty file"):
        list(iterate_documents(tmp_path))


def test_files_are_sorted_and_each_comes_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    names = ["sub/c.txt", "b.jsonl", "a.json.gz"]
    for name in [*names, ".hidden.txt", "README.md"]:
        (tmp_path / name).write_text("x")
    (tmp_path / "d.txt").symlink_to(tmp_path / "sub" / "c.txt")
    spec: list[str | Path] = [
        tmp_path,
        str(tmp_path / "*.jsonl"),
        tmp_path / "sub" / ".." / "b.jsonl",
        tmp_path / "sub",
    ]
    assert resolve_files(spec) == [tmp_path / name for name in ("a.json.gz", "b.jsonl", "d.txt")]


def test_link_to_a_blob_keeps_its_suffix(tmp_path: Path) -> None:
    """The layout of a hub cache."""
    (tmp_path / "0123abcd").write_text('{"text": "x"}\n')
    (tmp_path / "train.jsonl").symlink_to("0123abcd")
    assert [document.text for document in iterate_documents(tmp_path / "train.jsonl")] == ["x"]


def test_what_cannot_be_resolved(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    for spec in ("nothing.txt", "*.jsonl", "."):
        with pytest.raises(UserError, match="no file matches"):
            resolve_files(tmp_path / spec)
    with pytest.raises(UserError, match=r"notes.md: unknown suffix; known are .txt"):
        resolve_files(tmp_path / "notes.md")


def test_embedded_corpus_says_little_twice() -> None:
    """Less than 1 % of it, in paragraphs of more than 100 characters."""
    documents = list(embedded_documents())
    parts = Counter(part.strip() for d in documents for part in d.text.split("\n\n") if len(part.strip()) > 100)
    twice = sum(len(part) * (n - 1) for part, n in parts.items())
    assert twice < 0.01 * sum(len(document.text) for document in documents)
    left_out = set(topics) - {document.where.removeprefix("pydoc_data.topics:") for document in documents}
    kept = {line for document in documents for line in document.text.splitlines() if len(line) > 60}
    lines = [line for name in left_out for line in topics[name].splitlines() if len(line) > 60]
    assert sum(line in kept for line in lines) > 0.8 * len(lines)  # what is left out is said elsewhere


def test_embedded_corpus_is_the_language_reference() -> None:
    documents = list(embedded_documents())
    names = [document.where.removeprefix("pydoc_data.topics:") for document in documents]
    assert names == sorted(names)
    assert [document.text for document in documents] == [topics[name] for name in names]
    assert 300_000 < sum(len(document.text.encode()) for document in documents) < 800_000
    assert {document.unit for document in documents} == {"section"}
