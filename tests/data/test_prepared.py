"""The on-disk format keeps every token, is read in any range, and is whole or absent."""

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import pytest

from llmstack.data import PackedBlocks, PreparedData, SampleOrder, Split, iterate_documents, prepare, prepare_source
from llmstack.data.holdout import Holdout, units_of
from llmstack.data.prepared import SPLITS, ShardWriter, token_dtype, write_index
from llmstack.data.sources import embedded_documents
from llmstack.errors import UserError
from llmstack.tokenizer import BosEosPolicy, Tokenizer, load_tokenizer


class Vocabulary:
    """Stands for a tokenizer where ids are written directly."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.fingerprint = vocab_size, f"vocabulary of {vocab_size}"


def write_folder(
    folder: Path, documents: list[np.ndarray], vocab_size: int, **sizes: int
) -> tuple[PreparedData, np.ndarray]:
    """Documents as the training split (the first alone as the held-out one), and their flat stream."""
    folder.mkdir()
    writers = {split: ShardWriter(folder, split, vocab_size, **sizes) for split in ("train", "heldout")}
    for document in documents:
        writers["train"].add(document.tolist(), num_bytes=len(document))
    writers["heldout"].add(documents[0].tolist(), num_bytes=7)
    for writer in writers.values():
        writer.close()
    shards: Any = {split: writer.shards for split, writer in writers.items()}
    vocabulary: Any = Vocabulary(vocab_size)
    holdout = Holdout("document", frozenset(), len(documents), 1)
    write_index(folder, "identity", shards, vocabulary, BosEosPolicy(False, False), [], holdout)
    return PreparedData(folder), np.concatenate(documents)


def random_documents(vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    lengths = [3, *generator.integers(0, 60, 300), 500, 0]
    return [generator.integers(0, vocab_size, length) for length in lengths]


def shard_files(prepared: PreparedData, split: str) -> list[Path]:
    return [prepared.folder / shard["file"] for shard in prepared.index["splits"][split]["shards"]]


# ------------------------------------------------------------------------------------------- the format


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (128_256, "uint32")])
def test_ids_survive_in_any_range(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    documents = [*random_documents(vocab_size), np.array([vocab_size - 1, 0])]
    prepared, stream = write_folder(
        tmp_path / "data", documents, vocab_size, tokens_per_batch=200, tokens_per_shard=1500
    )
    split = prepared["train"]
    assert prepared.index["dtype"] == token_dtype(vocab_size).name == dtype
    assert len(shard_files(prepared, "train")) > 4
    assert (split.num_tokens, split.num_documents) == (len(stream), len(documents))
    assert split.num_bytes == len(stream)
    assert np.array_equal(split.read(0, len(stream)).numpy(), stream)
    owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    generator = np.random.default_rng(1)
    for start in [0, len(stream) - 1, *generator.integers(0, len(stream), 100)]:
        length = int(generator.integers(0, len(stream) - start + 1))
        assert np.array_equal(split.read(int(start), length).numpy(), stream[start : start + length])
        ids = split.document_ids(int(start), length).numpy()
        assert np.array_equal(ids, owner[start : start + length])
    assert split.read(5, 3).dtype == split.document_ids(5, 3).dtype
    for start, length in [(-1, 2), (0, len(stream) + 1), (len(stream), 1)]:
        with pytest.raises(IndexError):
            split.read(start, length)


@pytest.mark.full
def test_a_million_blocks_open_and_seek_at_once(tmp_path: Path) -> None:
    """Of 1,024 tokens each: opening, and any block of any epoch, take as long as with a thousand."""
    million, text = 1 << 20, np.arange(1 << 20, dtype=np.int64) % 50_000
    medians = {}
    for num_blocks in (1 << 10, million):
        folder = tmp_path / str(num_blocks)
        documents = [text] * (num_blocks // 1024) + [text[:2]]
        write_folder(folder, documents, 50_000)
        opening, seeking = list[float](), list[float]()
        for _ in range(5):
            start = time.perf_counter()
            blocks = PackedBlocks(PreparedData(folder), "train", 1024)
            order = SampleOrder(len(blocks), 0)
            opening.append(time.perf_counter() - start)
        assert len(blocks) == num_blocks
        for sample in [*range(10, 210), *range(10_000_000, 10_000_200), *range(10**12, 10**12 + 200)]:
            start = time.perf_counter()
            block = blocks[int(order(np.array([sample]))[0])]
            seeking.append(time.perf_counter() - start)
            assert block["input_ids"][1:].equal(block["labels"][:-1])
        medians[num_blocks] = median(opening), median(seeking)
    print(medians)
    assert max(opening for opening, _ in medians.values()) < 0.05
    assert max(seeking for _, seeking in medians.values()) < 0.001


def test_shards_are_hugging_face_data_sets(tmp_path: Path) -> None:
    documents = random_documents(100_000)
    prepared, _ = write_folder(tmp_path / "data", documents, 100_000, tokens_per_batch=200, tokens_per_shard=1500)
    rows = [row for path in shard_files(prepared, "train") for row in datasets.Dataset.from_file(str(path))]
    assert [row["tokens"] for row in rows] == [document.tolist() for document in documents]
    assert [row["bytes"] for row in rows] == [len(document) for document in documents]


@pytest.mark.parametrize("bad", [-1, 1000])
def test_id_outside_the_vocabulary_is_refused(tmp_path: Path, bad: int) -> None:
    with pytest.raises(UserError, match="outside its vocabulary of 1000"):
        ShardWriter(tmp_path, "train", 1000).add([5, bad], num_bytes=2)


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "flipped", "index", "version", "no index"])
def test_damage_is_reported(tmp_path: Path, damage: str) -> None:
    prepared, _ = write_folder(
        tmp_path / "data", random_documents(1000), 1000, tokens_per_batch=500, tokens_per_shard=2000
    )
    path, index = shard_files(prepared, "train")[1], prepared.folder / "index.json"
    raw = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(raw[:-8])
    elif damage == "longer":
        path.write_bytes(raw + b"\0" * 8)
    elif damage == "missing":
        path.unlink()
    elif damage == "flipped":
        flip_a_byte(path)
    elif damage == "index":
        index.write_bytes(index.read_bytes()[:-20])
    elif damage == "version":
        index.write_text(json.dumps(prepared.index | {"format_version": 1}))
    else:
        index.unlink()
    with pytest.raises(UserError, match="no prepared data here" if damage == "no index" else "delete the folder"):
        PreparedData(prepared.folder).verify()


def test_counts_that_differ_from_the_index_are_reported(tmp_path: Path) -> None:
    prepared, _ = write_folder(tmp_path / "data", random_documents(1000), 1000)
    record = prepared.index["splits"]["train"]
    record["shards"][0]["tokens"] += 1
    (prepared.folder / "index.json").write_text(json.dumps(prepared.index))
    with pytest.raises(UserError, match="delete the folder"):
        PreparedData(prepared.folder)["train"].read(0, 1)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    prepared, _ = write_folder(tmp_path / "data", random_documents(1000), 1000)
    other: Any = Vocabulary(999)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        PreparedData(prepared.folder, other)


# ------------------------------------------------------------------------------------------- preparing


def test_real_documents_with_a_real_tokenizer(shared: Path, cache: Path) -> None:
    """C4 with Llama 2: every document whole, in order, in one split; 50 held out and not trained on."""
    source = shared / "c4" / "c4_en_valid_1k.jsonl"
    tokenizer = load_tokenizer(shared / "tokenizers" / "llama-2" / "tokenizer.model")
    prepared = prepare_source(source, tokenizer, BosEosPolicy.default(tokenizer))
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    expected: dict[Split, list[list[int]]] = {"train": [], "heldout": []}
    smallest = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:50]
    for text in texts:
        ids = [1, *tokenizer.encode(text), 2]
        expected["heldout" if text in smallest else "train"].append(ids)
    for split, documents in expected.items():
        data = prepared[split]
        assert data.read(0, data.num_tokens).tolist() == [i for document in documents for i in document]
        assert data.num_documents == len(documents)
    assert prepared["heldout"].num_documents == 50
    assert prepared["train"].num_bytes + prepared["heldout"].num_bytes == sum(len(t.encode()) for t in texts)
    assert prepared.index["holdout"]["heldout_units"] == 50
    assert prepared.index["dtype"] == "uint16"
    assert prepared.index["sources"][0]["size"] == source.stat().st_size


def test_sections_of_a_document_are_marked_once(embedded: PreparedData, tokenizer: Tokenizer) -> None:
    """BOS before the first section that stays in a split and EOS after the last, wherever the others went."""
    lengths = [len(tokenizer.encode(text)) for document in embedded_documents() for text in units_of(document)]
    for split in ("train", "heldout"):
        rows = [row for p in shard_files(embedded, split) for row in datasets.Dataset.from_file(str(p))["tokens"]]
        assert len(rows) == embedded[split].num_documents
        for row in rows:
            assert (row[0], row[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            assert not {tokenizer.bos_id, tokenizer.eos_id} & set(row[1:-1])
    counts = embedded.index["splits"]
    marks = 2 * (counts["train"]["documents"] + counts["heldout"]["documents"])
    assert counts["train"]["tokens"] + counts["heldout"]["tokens"] == marks + sum(lengths)
    assert embedded["heldout"].num_tokens >= 15_000
    corpus = sum(len(document.text.encode()) for document in embedded_documents())
    assert counts["train"]["bytes"] + counts["heldout"]["bytes"] == corpus


def test_heldout_text_is_not_in_train(embedded: PreparedData, tokenizer: Tokenizer) -> None:
    text = {}
    for split in ("train", "heldout"):
        data = embedded[split]
        text[split] = tokenizer.decode(data.read(0, data.num_tokens).tolist())
    sections = [section for document in embedded_documents() for section in units_of(document) if len(section) > 500]
    sides = [(section in text["train"], section in text["heldout"]) for section in sections]
    assert all(in_train != in_heldout for in_train, in_heldout in sides)


class Refusing:
    """A tokenizer that has the name of another but must not be asked to tokenise."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.fingerprint, self.vocab_size = tokenizer.fingerprint, tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        raise AssertionError("tokenised again")

    encode_batch = encode


def test_second_start_does_not_tokenise(
    write_rows: Callable[..., Path], cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    path = write_rows(f"document {i}" for i in range(200))
    refusing: Any = Refusing(tokenizer)
    with pytest.raises(AssertionError, match="tokenised again"):
        prepare_source(path, refusing, policy)
    assert not list(cache.glob("*/index.json"))
    first = prepare_source(path, tokenizer, policy)
    second = prepare_source([str(path), path.parent / "*.jsonl"], refusing, policy)
    assert second.folder == first.folder
    assert second.index == first.index


def test_what_changes_the_data_prepares_anew(
    write_rows: Callable[..., Path], cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    path = write_rows(f"document {i}" for i in range(200))
    folders = {prepare_source(path, tokenizer, policy).folder}
    folders.add(prepare_source(path, tokenizer, BosEosPolicy(bos=False, eos=True)).folder)
    os.utime(path, ns=(1, 1))
    folders.add(prepare_source(path, tokenizer, policy).folder)
    write_rows(f"document {i}" for i in range(201))
    folders.add(prepare_source(path, tokenizer, policy).folder)
    assert len(folders) == 4


def test_files_that_are_held_out(
    write_rows: Callable[..., Path], tmp_path: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    """They are the held-out split, whole and in order, and a text that stands in them is not trained on."""
    heldout = write_rows(f"kept apart {i}" for i in range(3)).rename(tmp_path / "heldout.jsonl")
    train = write_rows([*(f"document {i}" for i in range(10)), "kept apart 1"])
    prepared = prepare_source(train, tokenizer, policy, heldout=heldout)
    text = {split: tokenizer.decode(prepared[split].read(0, prepared[split].num_tokens).tolist()) for split in SPLITS}
    assert text == {
        "train": "".join(f"document {i}" for i in range(10)),
        "heldout": "".join(f"kept apart {i}" for i in range(3)),
    }
    assert [entry["path"] for entry in prepared.index["holdout"]["rule"]] == [str(heldout)]
    os.utime(heldout, ns=(1, 1))
    assert prepare_source(train, tokenizer, policy, heldout=heldout).folder != prepared.folder
    with pytest.raises(UserError, match="no text is left for the train split"):
        prepare_source(heldout, tokenizer, policy, heldout=heldout)


def test_damaged_cache_is_reported(
    write_rows: Callable[..., Path], cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    path = write_rows(f"document {i}" for i in range(200))
    flip_a_byte(shard_files(prepare_source(path, tokenizer, policy), "train")[0])
    with pytest.raises(UserError, match=r"damaged .*delete the folder"):
        prepare_source(path, tokenizer, policy)


def test_too_many_bad_rows_leave_nothing(
    tmp_path: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' * 500 + '{"text": null}\n' * 6)
    with pytest.raises(UserError, match=f"6 of 506 rows are bad, more than a share of 0.01; the first is {path}:501"):
        prepare_source(path, tokenizer, policy)
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("rows", ['{"text": null}\n', "\n[1]\nx\n", '{"text": ""}\n'])
def test_nothing_but_bad_rows_is_refused(
    tmp_path: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy, rows: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    with pytest.raises(UserError, match="the source has no documents"):
        prepare_source(path, tokenizer, policy, max_bad_share=1.0)


def test_odd_rows_are_skipped_counted_and_listed(
    tmp_path: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    """What is bad of each kind, what looks odd and is good; on borders of units, too, with the right line."""
    long = "a word and " * 20_000
    good = [f"document {i}" for i in range(300)]
    good += ["two\r\nlines", "<|bos|>text<|eos|>", "same", "same", "\ufeffmark", " ", long]
    bad = [
        b'{"text": "cut',
        b'{"text": "\xff"}',
        b'{"text": null}',
        b'{"body": 1}',
        b'{"text": ""}',
        b"[]",
        b"\xff\xfe",
    ]
    lines = [json.dumps({"text": text}).encode() for text in good]
    for i, line in enumerate(bad):
        lines.insert(40 * i + 7, line)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\n")
    reports: list[str] = []
    prepared = prepare_source(
        path, tokenizer, policy, max_bad_share=0.03, unit_bytes=997, report=reports.append, out=tmp_path / "out"
    )
    skipped = [json.loads(line) for line in (prepared.folder / "skipped.jsonl").read_text().splitlines()]
    assert [row["where"] for row in skipped] == [f"{path}:{40 * i + 8}" for i in range(len(bad))]
    assert [row["reason"].split(" (")[0] for row in skipped] == [
        "bad JSON",
        "not UTF-8",
        "the text in field 'text' is missing or null; a string is expected",
        "the text in field 'text' is missing or null; a string is expected",
        "the text is empty",
        "a JSON object is expected, not list",
        "not UTF-8",
    ]
    assert reports[-1] == f"prepare: 7 bad rows were skipped; {prepared.folder / 'skipped.jsonl'} lists them"
    assert prepared.index["skipped_rows"] == 7
    assert len(prepared.index["splits"]["train"]["shards"]) > 5
    texts: dict[str, list[str]] = {}
    for split in SPLITS:
        rows = [row for p in shard_files(prepared, split) for row in datasets.Dataset.from_file(str(p))["tokens"]]
        assert all((row[0], row[-1]) == (tokenizer.bos_id, tokenizer.eos_id) for row in rows)
        assert all(not {tokenizer.bos_id, tokenizer.eos_id} & set(row[1:-1]) for row in rows)
        texts[split] = [tokenizer.decode(row) for row in rows]
    assert sorted(texts["train"] + texts["heldout"]) == sorted(good)
    assert [text for text in good if text in texts["train"]] == texts["train"]
    assert texts["train"].count("same") in (0, 2)


@pytest.mark.parametrize("kind", ["jsonl", *(pytest.param(k, marks=pytest.mark.full) for k in ("jsonl.gz", "parquet"))])
def test_processes_and_kills_change_nothing(
    write_rows: Callable[..., Path], tmp_path: Path, tokenizer_folder: Path, kind: str
) -> None:
    """Two processes, and three starts that are killed, make the files that one process makes."""
    texts = [f"document {i} " + "with some words " * (i % 40) for i in range(3_000)]
    source = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": texts}), source, row_group_size=100)
    elif kind == "jsonl":
        write_rows(texts)
    else:
        # Each compressed file is a unit.
        source = tmp_path / "files"
        source.mkdir()
        for i in range(8):
            rows = "".join(json.dumps({"text": text}) + "\n" for text in texts[i::8])
            (source / f"{i}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    found = []
    for name, kills, processes in (("one", 0, 1), ("two", 0, 2), ("killed", 3, 1)):
        out = tmp_path / name
        for kill in range(kills):
            killed = start_prepare(source, tokenizer_folder, str(out), "1", "kill")
            _, errors = killed.communicate(timeout=60)
            assert killed.returncode == -signal.SIGKILL, errors
            assert not out.exists()
            done = [path for path in out.with_name(".killed.tmp").glob("units/*") if "partial" not in path.name]
            assert len(done) == 2 * (kill + 1), "of three units the third was to be killed"
        process = start_prepare(source, tokenizer_folder, str(out), str(processes))
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        units = len(list((out / "units").iterdir()))
        assert units >= 8
        assert (f"6 of {units} units are there" in errors) == (kills > 0), errors
        files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
        found.append({path: hashlib.sha256((out / path).read_bytes()).hexdigest() for path in files})
    assert found[0] == found[1] == found[2]


def test_a_killed_worker_is_reported_and_what_is_finished_stays(
    many_rows: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    process = start_prepare(many_rows, tokenizer_folder, str(tmp_path / "out"), "2", "kill")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a process was killed, perhaps for want of memory" in errors.splitlines()[-1]
    assert (tmp_path / ".out.tmp" / "plan.json").is_file()


def test_a_full_disk_leaves_what_is_finished(
    write_rows: Callable[..., Path], small_disk: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    """One line, nothing under the name; with more room the same call goes on."""
    generator = np.random.default_rng(0)
    texts = (" ".join(map(str, generator.integers(0, 10**9, 400))) for _ in range(1200))
    source, out = write_rows(texts), small_disk / "out"
    with pytest.raises(UserError, match=r"cannot write .*No space left on device; check the disk space") as caught:
        prepare_source(source, tokenizer, policy, out=out, unit_bytes=500_000)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    finished = [path for path in small_disk.glob(".out.tmp/units/*") if "partial" not in path.name]
    assert finished
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    lines: list[str] = []
    prepare_source(source, tokenizer, policy, out=out, unit_bytes=500_000, report=lines.append).verify()
    assert any(line.startswith(f"prepare: {len(finished)} of ") for line in lines)


def test_what_others_have_beside_it_stays(
    write_rows: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    source = write_rows(f"document {i}" for i in range(200))
    for name in ("poetry.tmp/thesis.txt", "poetry.lock", ".clash.tmp/thesis.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    prepare_source(source, tokenizer, policy, out=tmp_path / "poetry")
    with pytest.raises(UserError, match="in the way and none of ours"):
        prepare_source(source, tokenizer, policy, out=tmp_path / "clash")
    for name in ("poetry.tmp/thesis.txt", "poetry.lock", ".clash.tmp/thesis.txt"):
        assert (tmp_path / name).read_text() == "mine"


def test_sources_and_places_that_cannot_be_meant(
    write_rows: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    write_rows(f"document {i}" for i in range(200))
    for source, out, says in (
        (tmp_path, tmp_path / "out", "lies in the source folder"),
        ("", tmp_path / "out", "an empty name"),
    ):
        with pytest.raises(UserError, match=says):
            prepare_source(source, tokenizer, policy, out=out)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.jsonl")).write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="the name is not UTF-8"):
        prepare_source([tmp_path], tokenizer, policy)


@pytest.mark.parametrize("missing", ["identity", "policy", "splits", "tokenizer"])
def test_an_index_with_holes_is_damaged(tmp_path: Path, missing: str) -> None:
    prepared, _ = write_folder(tmp_path / "data", random_documents(1000), 1000)
    index = {name: value for name, value in prepared.index.items() if name != missing}
    (prepared.folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"damaged .*; delete the folder {prepared.folder} and"):
        PreparedData(prepared.folder)


def test_a_folder_that_cannot_be_written_is_one_line(
    write_rows: Callable[..., Path], tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    with pytest.raises(UserError, match="cannot write /proc/nowhere"):
        prepare_source(write_rows(["x"] * 200), tokenizer, policy, out=Path("/proc/nowhere/out"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama-2/tokenizer.model", "llama-3/tokenizer.model"])
def test_time_and_memory_grow_with_the_length_of_a_document_and_no_faster(shared: Path, name: str) -> None:
    """Ten times the text in at most twelve times the time, with words and without; one of 50 MB is prepared."""
    tokenizer = load_tokenizer(shared / "tokenizers" / name)
    words = "".join(json.loads(line)["text"] for line in (shared / "c4" / "c4_en_valid_1k.jsonl").open())
    for text in (words, words.replace(" ", "").replace("\n", "")):
        text = (text * 3)[:5_000_000]
        times = {}
        for length in (500_000, 5_000_000):
            found = []
            for _ in range(3):
                start = time.process_time()
                tokenizer.encode(text[:length])
                found.append(time.process_time() - start)
            times[length] = min(found)
        assert times[5_000_000] < 12 * times[500_000], (name, times)


@pytest.mark.full
def test_a_document_of_50_megabytes(
    write_rows: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    long = "A word after another, and one more. " * 1_400_000
    prepared = prepare_source(
        write_rows([*(f"document {i}" for i in range(200)), long]), tokenizer, policy, out=tmp_path / "out"
    )
    assert prepared["train"].num_bytes + prepared["heldout"].num_bytes > 50_000_000
    assert max(prepared[split].num_tokens for split in SPLITS) > 5_000_000


def test_source_that_changes_meanwhile_is_refused(
    write_rows: Callable[..., Path], cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    path = write_rows(f"document {i}" for i in range(200))

    class Touching(Refusing):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:  # type: ignore[override]
            path.open("a").write("\n")
            return tokenizer.encode_batch(texts)

    touching: Any = Touching(tokenizer)
    touching.bos_id, touching.eos_id = tokenizer.bos_id, tokenizer.eos_id
    with pytest.raises(UserError, match="changed while it was being prepared"):
        prepare_source(path, touching, policy)
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]


PREPARE = """
import os, signal, sys
from pathlib import Path
from llmstack.data import prepare_source
from llmstack.tokenizer import BosEosPolicy, load_tokenizer

tokenizer = load_tokenizer(sys.argv[2])

class Killing(type(tokenizer)):
    calls = 0

    def encode_batch(self, texts):
        Killing.calls += 1
        if "kill" in sys.argv and Killing.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)

    def __reduce__(self):
        return Killing, super().__reduce__()[1]

if __name__ in ("__main__", "__mp_main__"):
    source = Path(sys.argv[1])
    size = sum(p.stat().st_size for p in source.rglob("*")) if source.is_dir() else source.stat().st_size
if __name__ == "__main__":
    killing = Killing(tokenizer._files)
    out = Path(sys.argv[3]) if sys.argv[3] != "cache" else None
    prepared = prepare_source(
        source, killing, BosEosPolicy(True, True), out=out, num_proc=int(sys.argv[4]), unit_bytes=-(-size // 8) + 64
    )
    print(prepared.folder, prepared["train"].num_tokens, Killing.calls > 0)
"""


def start_prepare(source: Path, tokenizer: Path, *extra: str) -> "subprocess.Popen[str]":
    script = tokenizer / "prepare.py"
    script.write_text(PREPARE)
    command = [sys.executable, str(script), str(source), str(tokenizer), *extra]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def many_rows(write_rows: Callable[..., Path]) -> Path:
    return write_rows(f"document {i} " + "with some words " * 40 for i in range(5_000))


@pytest.fixture(scope="module")
def tokenizer_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return folder


def test_killed_writer_leaves_nothing_under_the_name(
    many_rows: Path, tokenizer_folder: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    killed = start_prepare(many_rows, tokenizer_folder, "cache", "1", "kill")
    _, errors = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL, errors
    assert {entry.suffix for entry in cache.iterdir()} == {".lock", ".tmp"}
    prepared = prepare_source(many_rows, tokenizer, policy, unit_bytes=-(-many_rows.stat().st_size // 8) + 64)
    prepared.verify()
    total = prepared["train"].num_documents + prepared["heldout"].num_documents
    assert (total, prepared["heldout"].num_documents) == (5_000, 50)
    assert {entry.suffix for entry in cache.iterdir()} == {".lock", ""}


def test_two_processes_prepare_the_same_data(many_rows: Path, tokenizer_folder: Path, cache: Path) -> None:
    both = [start_prepare(many_rows, tokenizer_folder, "cache", "1") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    (folder, tokens, one), (same_folder, same_tokens, other) = (output.split() for output, _ in outputs)
    assert (folder, tokens) == (same_folder, same_tokens)
    assert {one, other} == {"True", "False"}  # one tokenised, the other waited for it


def test_long_work_reports(
    write_rows: Callable[..., Path],
    cache: Path,
    tokenizer: Tokenizer,
    policy: BosEosPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    prepare_source(write_rows(str(i) for i in range(9000)), tokenizer, policy, report=lines.append)
    assert lines[0] == "prepare: 1,024 documents looked at"
    assert re.fullmatch(r"prepare: 4,096 documents, [0-9,]+ tokens, [0-9.]+ MB/s of text, 0:00:0[0-9] left", lines[-2])
    assert lines[-1].startswith("prepare: 9,000 documents, ")


def test_parquet_and_json_lines_prepare_alike(
    write_rows: Callable[..., Path], tmp_path: Path, cache: Path, tokenizer: Tokenizer, policy: BosEosPolicy
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"document {i}\n" * (1 + i % 7) for i in range(300)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    rows = prepare_source(write_rows(texts), tokenizer, policy)
    table = prepare_source(tmp_path / "rows.parquet", tokenizer, policy)
    assert rows.index["splits"] == table.index["splits"]
    assert rows.index["holdout"] == table.index["holdout"]
    assert [d.text for d in iterate_documents(tmp_path / "rows.parquet")] == texts
