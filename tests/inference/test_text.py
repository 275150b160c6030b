"""Text as it comes: whole characters, nothing of a stop string, and in the end all that the ids say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack.errors import UserError
from llmstack.inference import Generator, Request
from llmstack.inference.text import TextStream
from llmstack.model import Llama
from llmstack.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

CORPUS = (
    "the cat sat on the mat 🐈 und die Katze saß auf der Matte 😀😀 ; 猫はマットの上に座った 👩‍👩‍👧 aab aab abab\n" * 20
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level, with merges within and across characters."""
    return train_tokenizer([CORPUS], 330)


def pushed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """The piece of each id, up to the first stop string, and what is left."""
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.flush()]


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id for each byte of ``text``."""
    alone = {tokenizer._byte_table[token]: token for token in range(2, 258)}
    return [alone[bytes([byte])] for byte in text.encode()]


def cut(text: str, stops: Sequence[str]) -> str:
    """``text`` before the first of ``stops``."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def test_characters_come_whole_whatever_bytes_the_ids_hold(tokenizer: Tokenizer) -> None:
    text = "ß猫😀👩‍👧a"
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in spelled(tokenizer, text)]
    assert "".join(pieces) == text
    assert stream.flush() == ""
    assert all(len(piece) <= 1 and "\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert pieces[:5] == ["", "ß", "", "", "猫"]


def test_a_character_that_is_never_completed_is_a_mark_at_the_end(tokenizer: Tokenizer) -> None:
    ids = spelled(tokenizer, "a😀")[:-1]
    assert pushed(TextStream(tokenizer), ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert tokenizer.decode(ids) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("stop", ["\n\nUser", "😀猫", "aab", "aaaa", "x"])
def test_a_stop_string_is_found_wherever_the_tokens_cut_it(tokenizer: Tokenizer, stop: str) -> None:
    """Every split of "… stop …" into tokens at the stop string's bytes, by a tokenizer whose tokens are the pieces."""
    raw = stop.encode()
    for mask in itertools.product([False, True], repeat=len(raw) - 1):
        borders = [0, *(place for place, is_border in enumerate(mask, 1) if is_border), len(raw)]
        pieces = [raw[start:end] for start, end in itertools.pairwise(borders)]
        pieces[0] = b"say " + pieces[0]
        pieces[-1] += b" more"
        stream = TextStream(TableTokenizer(pieces), [stop])
        found = pushed(stream, range(len(pieces)))
        assert "".join(found) == "say "
        assert stream.stopped
        assert len(found) == len(pieces) + 1, "not before it is complete"


class TableTokenizer(Tokenizer):
    """Whose ids stand for given bytes."""

    name = "table"

    def __init__(self, table: Sequence[bytes], special_ids: Sequence[int] = ()) -> None:
        super().__init__({}, vocab_size=len(table), bos_id=None, eos_id=None, special_ids=special_ids)
        self._table = list(table)

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def library_batch(self, texts: list[str]) -> object:
        raise NotImplementedError

    def _definition(self) -> bytes:
        raise NotImplementedError

    def _special_name(self, token_id: int) -> str:
        raise NotImplementedError

    def _token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a", "a", "b", "c"], ["ab"], ["", "a", "", ""]),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""]),
        (["x", "ab", "ab", "ac"], ["abac"], ["x", "", "ab", "", ""]),
        (["x", "ab", "d"], ["abc"], ["x", "", "abd", ""]),
        (["x", "ab"], ["abc"], ["x", "", "ab"]),
        (["one two three"], ["three", "two"], ["one ", ""]),
        (["one t", "w", "o three"], ["three", "two"], ["one ", "", "", ""]),
        (["a.b"], ["b", "."], ["a", ""]),
        (["ab", "c"], ["abc", "bd"], ["", "", ""]),
        (["hello", "!"], [], ["hello", "!", ""]),
        (["STOP"], ["STOP"], ["", ""]),
    ],
)
def test_nothing_that_may_become_a_stop_string_is_let_go_and_nothing_else_is_held(
    pieces: list[str], stops: list[str], expected: list[str]
) -> None:
    table = TableTokenizer([piece.encode() for piece in pieces])
    assert pushed(TextStream(table, stops), range(len(pieces))) == expected


def test_after_the_stop_string_nothing_comes_any_more() -> None:
    stream = TextStream(TableTokenizer([b"a.", b"b"]), ["."])
    assert [stream.push(0), stream.push(1), stream.push(0), stream.flush()] == ["a", "", "", ""]


def test_a_stop_id_is_no_part_of_the_text_and_what_was_held_comes_with_the_end() -> None:
    table = TableTokenizer([b"one t", b"<end>", b" two"])
    stream = TextStream(table, ["two"], stop_ids=[1])
    assert [stream.push(0), stream.push(1), stream.flush()] == ["one ", "", "t"]
    assert not stream.stopped


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_of_any_ids_join_to_their_text_before_the_first_stop_string(tokenizer: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(150):
        if seed % 2:
            ids = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(40))]
        else:
            start = chance.randrange(len(CORPUS) - 60)
            ids = tokenizer.encode(CORPUS[start : start + chance.randrange(60)])
        text = tokenizer.decode(ids)
        stops = ["zebra"]
        if text:
            start = chance.randrange(len(text))
            stops.append(text[start : start + chance.randrange(1, 6)])
        stream = TextStream(tokenizer, stops)
        pieces = pushed(stream, ids)
        assert "".join(pieces) == cut(text, stops)
        shown = "".join(pieces[:-1])
        assert all(stop not in shown for stop in stops)


def test_of_several_stop_strings_the_first_to_be_complete_wins_wherever_the_tokens_cut_them() -> None:
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choices("abc", k=12))
        stops = ["".join(chance.choices("abc", k=chance.randrange(1, 4))) for _ in range(2)]
        pieces, place = [], 0
        while place < len(text):
            width = chance.randrange(1, 4)
            pieces.append(text[place : place + width])
            place += width
        stream = TextStream(TableTokenizer([piece.encode() for piece in pieces]), stops)
        found = "".join(pushed(stream, range(len(pieces))))
        begun = (text[:length] for length in range(len(text) + 1))
        complete = next((part for part in begun if any(stop in part for stop in stops)), text)
        assert found == cut(complete, stops)
        assert stream.stopped == any(stop in text for stop in stops)


@pytest.mark.parametrize("kind", ["gpt2", "llama-2", "mistral-v3", "llama-3"])
def test_real_tokenizers_stream_what_they_decode(shared: Path, kind: str) -> None:
    real = load_tokenizer(shared / "tokenizers" / kind)
    chance = random.Random(1)
    for text in (CORPUS[:120], " leading", "Ein Satz.\n\nUser: 😀"):
        ids = real.encode(text)
        pieces = pushed(TextStream(real), ids)
        assert "".join(pieces) == real.decode(ids)
        stop = text[len(text) // 2 :][:4]
        assert "".join(pushed(TextStream(real, [stop]), ids)) == cut(real.decode(ids), [stop])
    for _ in range(20):
        ids = [chance.randrange(real.vocab_size) for _ in range(20)]
        assert "".join(pushed(TextStream(real), ids)) == real.decode(ids)


# --------------------------------------------------------------------------------------------- in a generator


@pytest.fixture(scope="session")
def storyteller(stories: Llama, shared: Path) -> Callable[..., Generator]:
    tokenizer = load_tokenizer(shared / "checkpoints/stories260K/hf")

    def build(**options: Any) -> Generator:
        return Generator(stories, 257, tokenizer=tokenizer, **options)

    return build


def test_tokens_carry_the_published_text(
    storyteller: Callable[..., Generator], published_ids: list[int], shared: Path
) -> None:
    published = (shared / "checkpoints/stories260K/greedy-256.txt").read_text().removesuffix("\n")
    generator = storyteller(batch_size=2)
    tokens = list(generator.run([Request([1], 100)] * 2))
    for number in (0, 1):
        text = "".join(token.text for token in tokens if token.request == number)
        assert text == generator.tokenizer.decode(published_ids[:100])
        assert published.startswith(text)
        assert len(text) > 100


@pytest.mark.parametrize("stop", ["Lily", " girl named", "upon a time", "y", "Once", "never said"])
@pytest.mark.parametrize("draft", [False, True])
def test_a_generator_stops_at_the_string(
    storyteller: Callable[..., Generator], stories: Llama, published_ids: list[int], stop: str, draft: bool
) -> None:
    generator = storyteller(draft=stories if draft else None)
    completion = generator.generate([Request([1], 60, stop_strings=["never", stop])])[0]
    tokenizer = generator.tokenizer
    text = tokenizer.decode(published_ids[:60])
    assert completion.text == cut(text, [stop])
    assert completion.finish == ("stop" if stop in text else "length")
    number = len(completion.ids)
    assert completion.ids == published_ids[:number]
    if stop in text:
        assert stop in tokenizer.decode(completion.ids)
        assert stop not in tokenizer.decode(completion.ids[:-1]), "not a token more than it needs"


def test_a_stop_id_ends_ids_but_not_text_and_nothing_is_held_back(
    storyteller: Callable[..., Generator], published_ids: list[int]
) -> None:
    generator = storyteller()
    tokenizer = generator.tokenizer
    place = 20
    stop = published_ids[place]
    first = published_ids.index(stop)
    request = Request([1], 60, stop_ids=[stop], stop_strings=[tokenizer.decode(published_ids[: first + 2])])
    completion = generator.generate([request])[0]
    assert completion.ids == published_ids[: first + 1]
    assert completion.text == tokenizer.decode(published_ids[:first])
    assert completion.finish == "stop"


def test_the_tokenizer_says_what_can_be_drawn(random_model: Callable[..., Llama], tokenizer: Tokenizer) -> None:
    model = random_model(vocab_size=tokenizer.vocab_size + 30, initializer_range=1e-4, num_layers=1)
    generator = Generator(model, 128, tokenizer=tokenizer)
    assert generator.drawn_vocab_size == tokenizer.vocab_size
    assert torch.tensor(list(generator.stream([1], 100))).max() < tokenizer.vocab_size


def test_stop_strings_that_cannot_be_found_are_refused(random_model: Callable[..., Llama]) -> None:
    generator = Generator(random_model(num_layers=1), 64)
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        generator.run([Request([1], 5, stop_strings=["a"])])
    with pytest.raises(UserError, match="an empty stop string"):
        Request([1], 5, stop_strings=["a", ""])


def test_without_a_tokenizer_there_is_no_text(random_model: Callable[..., Llama]) -> None:
    assert Generator(random_model(num_layers=1), 64).generate([Request([1], 5)])[0].text == ""
