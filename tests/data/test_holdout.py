"""The held-out split is a function of the texts alone and has the promised size."""

import hashlib
import random
from collections import Counter

import pytest

from llmstack.data import Document
from llmstack.data.holdout import (
    SECTION_CHARACTERS,
    Holdout,
    SmallestHashes,
    choose_holdout,
    cut_sections,
    num_heldout_documents,
    text_hash,
    units_of,
)
from llmstack.data.sources import embedded_documents
from llmstack.errors import UserError
from llmstack.tokenizer import Tokenizer


def rows(texts: list[str]) -> list[Document]:
    return [Document(text, f"rows:{i}", "document") for i, text in enumerate(texts, start=1)]


def choose(documents: list[Document], tokenizer: Tokenizer) -> Holdout:
    return choose_holdout(lambda: documents, tokenizer)


@pytest.mark.parametrize(
    ("documents", "heldout"),
    [(100, 50), (10_000, 50), (10_200, 51), (20_000, 100), (1_999_800, 9_999), (2_000_000, 10_000), (10**9, 10_000)],
)
def test_half_a_percent_between_50_and_10000(documents: int, heldout: int) -> None:
    assert num_heldout_documents(documents) == heldout


@pytest.mark.parametrize(("documents", "heldout"), [(100, 50), (1_000, 50), (20_000, 100)])
def test_the_smallest_hashes_are_held_out(documents: int, heldout: int, tokenizer: Tokenizer) -> None:
    texts = [f"text {i}" for i in range(documents)]
    holdout = choose(rows(texts), tokenizer)
    expected = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())[:heldout]
    assert {text for text in texts if text_hash(text) in holdout.hashes} == set(expected)
    assert (holdout.num_units, holdout.num_heldout) == (documents, heldout)


def test_order_does_not_matter(tokenizer: Tokenizer) -> None:
    documents = rows([f"text {i // 2 if i < 100 else i}" for i in range(500)])
    first = choose(documents, tokenizer)
    random.Random(0).shuffle(documents)
    assert choose(documents, tokenizer) == first


def test_identical_texts_fall_on_the_same_side(tokenizer: Tokenizer) -> None:
    documents = rows([f"text {i // 3}" for i in range(3000)])
    holdout = choose(documents, tokenizer)
    split_of: dict[str, set[str]] = {}
    for document in documents:
        for split, (text,) in holdout.divide(document):
            split_of.setdefault(text, set()).add(split)
    assert all(len(splits) == 1 for splits in split_of.values())
    sides = Counter(split_of[document.text].pop() for document in documents if split_of[document.text])
    assert 50 <= holdout.num_heldout <= 10_000
    assert sides["heldout"] * 3 == holdout.num_heldout == 51


def test_a_text_repeated_too_often_is_not_held_out(tokenizer: Tokenizer) -> None:
    """The smallest hash of all, 2,000 times: holding it out would make the split forty times too large."""
    texts = [f"text {i}" for i in range(1000)]
    most = min(texts, key=text_hash)
    holdout = choose(rows(texts + [most] * 2000), tokenizer)
    assert text_hash(most) not in holdout.hashes
    assert holdout.num_heldout == 50


def test_smallest_hashes_with_counts_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by one or by four, whose findings are put together."""
    monkeypatch.setattr("llmstack.data.holdout.MAX_DOCUMENTS", 500)
    generator = random.Random(1)
    hashes = [text_hash(str(generator.randrange(3000))) for _ in range(20_000)]
    expected = Counter(hashes)
    together = SmallestHashes()
    for part in range(4):
        seen = SmallestHashes()
        for digest in hashes[part * 5000 : (part + 1) * 5000]:
            seen.add(digest)
        assert len(seen.counts) == 500
        together.merge(seen)
    assert together.total == 20_000
    assert together.counts == {digest: expected[digest] for digest in sorted(expected)[:500]}


def test_own_hash_is_that_of_the_sorted_hashes(tokenizer: Tokenizer) -> None:
    texts = [f"text {i}" for i in range(100)]
    hashes = sorted(hashlib.sha256(text.encode()).digest() for text in texts)[:50]
    assert choose(rows(texts), tokenizer).fingerprint == hashlib.sha256(b"".join(hashes)).hexdigest()


def test_sources_too_small_or_mixed(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"only 99 documents, .*at least 100"):
        choose(rows([f"text {i}" for i in range(99)]), tokenizer)
    with pytest.raises(UserError, match=r"too few different texts .*remove duplicates"):
        choose(rows(["same"] * 1000), tokenizer)
    with pytest.raises(UserError, match=r"a.txt:1 and b.jsonl:1: .*prepare them apart"):
        choose([Document("x", "a.txt:1", "section"), Document("x", "b.jsonl:1", "document")], tokenizer)
    with pytest.raises(UserError, match=r"too short: .*15,000 must be held out"):
        choose([Document("a short line\n" * 3, "a.txt:1", "section")], tokenizer)
    with pytest.raises(UserError, match=r"no documents"):
        choose([], tokenizer)


LINES = "".join(f"line {i} " + "x" * (i * 37 % 300) + "\r\n" for i in range(500))


@pytest.mark.parametrize(
    "text",
    ["", "\n", "\n" * 9000, LINES, "no line end", "word " * 5000, "x" * 9000, LINES + "x" * 5000 + "\n" + LINES],
)
def test_sections_join_to_the_text(text: str) -> None:
    sections = cut_sections(text)
    assert "".join(sections) == text
    assert all(sections)
    assert all(len(section) <= 2 * SECTION_CHARACTERS for section in sections)


def test_sections_end_at_line_ends() -> None:
    sections = cut_sections(LINES)
    assert all(section.endswith("\r\n") for section in sections)
    assert all(SECTION_CHARACTERS <= len(section) < SECTION_CHARACTERS + 310 for section in sections[:-1])
    assert all(section.endswith(" ") for section in cut_sections("word " * 5000))


def test_embedded_corpus_holds_out_enough_and_no_more(tokenizer: Tokenizer) -> None:
    documents = list(embedded_documents())
    holdout = choose(documents, tokenizer)
    ranked = sorted({text_hash(text): text for d in documents for text in units_of(d)}.items())
    heldout = [text for digest, text in ranked if digest in holdout.hashes]
    assert heldout == [text for _, text in ranked[: len(heldout)]]
    lengths = [len(tokenizer.encode(text)) for text in heldout]
    tenth = holdout.num_units / 10
    assert sum(lengths) >= 15_000
    assert tenth <= holdout.num_heldout <= holdout.num_units / 2
    assert holdout.num_heldout - 1 < tenth or sum(lengths[:-1]) < 15_000


def test_a_large_text_holds_out_a_tenth(tokenizer: Tokenizer) -> None:
    text = "".join(f"{i} is {i * i} when squared\n" for i in range(60_000))
    holdout = choose([Document(text, "a.txt:1", "section")], tokenizer)
    assert 0 <= holdout.num_heldout - holdout.num_units / 10 < 1


def test_dividing_loses_nothing(tokenizer: Tokenizer) -> None:
    documents = list(embedded_documents())
    holdout = choose(documents, tokenizer)
    for document in documents:
        parts = dict(holdout.divide(document))
        texts = [text for part in parts.values() for text in part]
        assert Counter(texts) == Counter(units_of(document))
        for part in parts.values():  # in the order of the document
            assert [text for text in units_of(document) if text in part] == part
