"""A stream gives each row once an epoch whoever shares it, and goes on where it was to the token."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from llmstack.data import stream
from llmstack.data.holdout import text_hash
from llmstack.data.stream import Lane, Place, StreamLoader, StreamMicroBatches, StreamSource
from llmstack.errors import UserError
from llmstack.tokenizer import BosEosPolicy, Tokenizer

FILES, ROWS, BLOCK = 8, 37, 16
LAYOUTS = [(ranks, workers) for ranks in (1, 2, 3) for workers in (0, 2, 4)]


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW", 8)
    monkeypatch.setattr(stream, "_ENCODE_DOCUMENTS", 5)


@pytest.fixture
def texts() -> list[list[str]]:
    """Of each file; they differ in rows, as files do."""
    return [[f"file {f} row {r} " + "and more " * (r % 9) for r in range(ROWS + 5 * f)] for f in range(FILES)]


@pytest.fixture
def source(texts: list[list[str]], tmp_path: Path, tokenizer: Tokenizer, policy: BosEosPolicy) -> StreamSource:
    paths = [tmp_path / f"{f}.jsonl" for f in range(FILES)]
    for path, rows in zip(paths, texts, strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return StreamSource(tuple(paths), tokenizer, policy, "text", frozenset(), BLOCK, True, seed=3)


def lanes_of(source: StreamSource, ranks: int, workers: int) -> list[Lane]:
    count = ranks * max(workers, 1)
    return [Lane(source, number, count, Place()) for number in range(count)]


@pytest.mark.parametrize(("ranks", "workers"), LAYOUTS)
def test_an_epoch_is_each_row_once_over_all_lanes(
    source: StreamSource, texts: list[list[str]], ranks: int, workers: int
) -> None:
    """Twelve lanes share eight files by rows; every lane goes on with the next epoch when its own is over."""
    seen: Counter[str] = Counter()
    for lane in lanes_of(source, ranks, workers):
        seen.update(text for _, _, _, text in takewhile(lambda found: found[0] == 0, lane.documents()))
    assert seen == Counter(text for rows in texts for text in rows)


def blocks(lane: Lane, count: int) -> list[tuple[list[int], list[int], Place]]:
    return [
        (block["input_ids"].tolist(), block["labels"].tolist(), place) for block, place in islice(iter(lane), count)
    ]


def test_windows_are_the_token_stream_shuffled(source: StreamSource, tokenizer: Tokenizer) -> None:
    """The blocks of each window, sorted by where they lie, are the stream of the lane's documents without a gap."""
    lane, policy = Lane(source, 1, 3, Place()), source.policy
    documents = (text for *_, text in Lane(source, 1, 3, Place()).documents())
    ids: list[int] = []
    while len(ids) < 10 * 8 * BLOCK + 1:
        ids += policy.wrap(tokenizer.encode(next(documents)), tokenizer)
    found = blocks(lane, 80)
    for window in range(10):
        start = window * 8 * BLOCK
        expected = [
            (ids[at : at + BLOCK], ids[at + 1 : at + BLOCK + 1]) for at in range(start, start + 8 * BLOCK, BLOCK)
        ]
        given = [(inputs, labels) for inputs, labels, _ in found[window * 8 : window * 8 + 8]]
        assert sorted(given) == sorted(expected)
        assert given != expected or window > 0
    assert any(
        [inputs for inputs, *_ in found[w * 8 : w * 8 + 8]] != sorted(inputs for inputs, *_ in found[w * 8 : w * 8 + 8])
        for w in range(10)
    )


def test_document_ids_tell_documents_apart(source: StreamSource, tokenizer: Tokenizer) -> None:
    for block, _ in islice(iter(Lane(source, 0, 2, Place())), 40):
        inputs, owners = block["input_ids"], block["document_ids"]
        starts = np.flatnonzero(inputs == tokenizer.bos_id)
        assert set(np.flatnonzero(np.diff(owners)) + 1) == set(starts) - {0}


@pytest.mark.parametrize("stop", [1, 7, 8, 9, 61, 200])
def test_a_lane_goes_on_from_any_place(source: StreamSource, stop: int) -> None:
    """Over several epochs, from a place that went through JSON."""
    whole = blocks(Lane(source, 2, 3, Place()), 260)
    assert whole[-1][2].epoch >= 1
    place = Place(**json.loads(json.dumps(whole[stop - 1][2].__dict__)))
    assert blocks(Lane(source, 2, 3, place), 260 - stop) == whole[stop:]


def test_a_document_longer_than_windows(source: StreamSource, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "word after word " * 2000}) + '\n{"text": "short"}\n')
    long = StreamSource((path,), source.tokenizer, source.policy, "text", frozenset(), BLOCK, False, seed=3)
    whole = blocks(Lane(long, 0, 1, Place()), 100)
    for stop in (3, 16, 50):
        assert blocks(Lane(long, 0, 1, whole[stop - 1][2]), 100 - stop) == whole[stop:]


def loader(
    source: StreamSource, ranks: int, rank: int, workers: int, places: list[Place] | None = None, steps: int = 0
) -> StreamLoader:
    count = max(workers, 1)
    batches = StreamMicroBatches(source, 2, ranks, rank, places or [Place()] * count, steps * 2)
    loader = DataLoader(batches, batch_size=None, num_workers=workers)
    return StreamLoader(loader, 2, steps, steps * 2 * ranks * 2, print)


def take(loading: StreamLoader, steps: int, ahead: int = 0) -> list[dict[str, Any]]:
    """The micro-batches of so many steps, and some more that were fetched too early."""
    iterator: Iterator[dict[str, Any]] = iter(loading)
    found = [next(iterator) for _ in range(2 * steps + ahead)]
    return found[: 2 * steps]


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(torch.as_tensor(x[k]), torch.as_tensor(y[k])) for k in x)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 4), (3, 2)])
def test_three_segments_are_one_run(source: StreamSource, ranks: int, workers: int) -> None:
    """5 + 5 + 5 steps are 15, stopped where it is not the first worker's turn, with batches fetched ahead."""
    for rank in range(ranks):
        whole = take(loader(source, ranks, rank, workers), 15)
        parts: list[dict[str, Any]] = []
        places: list[Place] | None = None
        for segment in range(3):
            loading = loader(source, ranks, rank, workers, places, steps=5 * segment)
            parts += take(loading, 5, ahead=3)
            places = [Place(**place) for place in loading.places(5 * segment + 5)]
        assert same(parts, whole)
        ids = torch.cat([batch["sample_ids"] for batch in whole])
        expected = [s * 4 * ranks + m * 2 * ranks + rank * 2 + i for s in range(15) for m in range(2) for i in range(2)]
        assert ids.tolist() == expected
        assert {int(batch["valid_tokens"]) for batch in whole} == {2 * ranks * 2 * BLOCK}


def test_held_out_texts_and_bad_rows_are_left_out(source: StreamSource, texts: list[list[str]]) -> None:
    path = source.files[0]
    path.write_text(path.read_text() + "broken\n")
    excluded = frozenset(text_hash(text) for text in texts[0][:5])
    one = StreamSource((path,), source.tokenizer, source.policy, "text", excluded, BLOCK, False, seed=3)
    lane = Lane(one, 0, 1, Place())
    found = [text for *_, text in islice(lane.documents(), len(texts[0]) - 5)]
    assert found == texts[0][5:]
    list(islice(lane.documents(), len(texts[0])))
    assert [row.where for row in lane.skipped] == [f"{path}:{len(texts[0]) + 1}"]


def test_nothing_to_train_on_is_said_in_one_line(source: StreamSource, texts: list[list[str]]) -> None:
    excluded = frozenset(text_hash(text) for text in texts[0])
    one = StreamSource(source.files[:1], source.tokenizer, source.policy, "text", excluded, BLOCK, False, seed=3)
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"hold no text to train on$"):
            next(iter(loader(one, 1, 0, workers)))


def test_too_many_bad_rows_end_the_run(source: StreamSource, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(('{"text": "good enough to read"}\n' * 40 + "broken\n") * 60)
    bad = StreamSource((path,), source.tokenizer, source.policy, "text", frozenset(), BLOCK, False, seed=3)
    with pytest.raises(UserError, match=r"of the first [0-9,]+ rows are bad"):
        take(loader(bad, 1, 0, 0), 400)
