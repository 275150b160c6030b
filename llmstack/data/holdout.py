"""The held-out split: fixed by the texts alone, never trained on.

Every unit of text (a document, or a section of about 2 kB of a plain-text file) is ranked by the SHA-256 of
its text, and those with the smallest hashes are held out. So the split depends neither on the order of the
data nor on any seed, and identical texts always fall on the same side. Where files of their own are held out, the
same texts are left out of the training data.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmstack.data.sources import Document
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.tokenizer import Tokenizer

DOCUMENT_FRACTION, MIN_DOCUMENTS, MAX_DOCUMENTS = 0.005, 50, 10_000
SECTION_FRACTION, MIN_SECTION_TOKENS, SECTION_CHARACTERS = 0.10, 15_000, 2_000
RULE = {
    "documents": [DOCUMENT_FRACTION, MIN_DOCUMENTS, MAX_DOCUMENTS],
    "sections": [SECTION_FRACTION, MIN_SECTION_TOKENS, SECTION_CHARACTERS],
}
"""What defines the split beside the texts; part of the identity of prepared data."""

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Holdout:
    """Which texts are held out; ``num_units`` counts all units of the source, ``num_heldout`` theirs."""

    unit: Literal["document", "section"]
    hashes: frozenset[bytes]
    num_units: int
    num_heldout: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the sorted hashes of the held-out texts."""
        return hashlib.sha256(b"".join(sorted(self.hashes))).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"hashes": [digest.hex() for digest in sorted(self.hashes)]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Holdout:
        """The inverse of :meth:`to_dict`."""
        return cls(**(values | {"hashes": frozenset(map(bytes.fromhex, values["hashes"]))}))

    def divide(self, document: Document) -> Iterator[tuple[Split, list[str]]]:
        """The part of a document that stays in each split, as texts in order; empty parts are left out.

        Each part is one document of its split: whoever tokenises it puts BOS before its first text and EOS
        after its last, wherever the sections in between went.
        """
        parts: dict[Split, list[str]] = {"train": [], "heldout": []}
        for text in units_of(document):
            parts["heldout" if text_hash(text) in self.hashes else "train"].append(text)
        return ((split, texts) for split, texts in parts.items() if texts)


def text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def units_of(document: Document) -> list[str]:
    """The texts by which the held-out rule takes a document; joined, they are the document exactly."""
    return [document.text] if document.unit == "document" else cut_sections(document.text)


def cut_sections(text: str) -> list[str]:
    """Cut a text at the first line end past every 2,000 characters; joined, the sections are the text.

    Where a line runs on for 2,000 characters more, the cut is after a space instead, or in mid-word.
    """
    sections, start = [], 0
    while start < len(text):
        limit = start + SECTION_CHARACTERS
        end = text.find("\n", limit - 1, limit + SECTION_CHARACTERS) + 1
        if not end:
            end = text.rfind(" ", start, limit) + 1 or limit
            end = end if len(text) > limit + SECTION_CHARACTERS else len(text)
        sections.append(text[start:end])
        start = end
    return sections


def choose_holdout(documents: Callable[[], Iterable[Document]], tokenizer: Tokenizer) -> Holdout:
    """Choose the held-out texts of a source, which is read once or (sections) up to three times.

    ``documents`` starts a new iteration. Raises :class:`UserError` where the source is too small to hold out
    the minimum, or mixes documents and plain text.
    """
    first, same_kind = _of_one_unit(documents(), "the source has no documents")
    if first.unit == "document":
        hashes = SmallestHashes()
        for document in same_kind:
            hashes.add(text_hash(document.text))
        return choose_documents(hashes)
    return _choose_sections(documents, same_kind, tokenizer)


def hold_out_all(documents: Iterable[Document]) -> Holdout:
    """Held out are all texts of ``documents``, which are a source of their own."""
    first, same_kind = _of_one_unit(documents, "the held-out files have no documents")
    counts = Counter(text_hash(text) for document in same_kind for text in units_of(document))
    return Holdout(first.unit, frozenset(counts), counts.total(), counts.total())


def _of_one_unit(documents: Iterable[Document], if_none: str) -> tuple[Document, Iterator[Document]]:
    """The first, and all of them, which must be held out by the same rule."""
    iterator = iter(documents)
    first = next(iterator, None)
    if first is None:
        raise UserError(if_none)
    return first, (_of_unit(document, first) for document in itertools.chain([first], iterator))


def _of_unit(document: Document, first: Document) -> Document:
    if document.unit != first.unit:
        raise mixed(first.where, document.where)
    return document


def mixed(one: str, other: str) -> UserError:
    """What to say of a source with documents of both units, at these places."""
    return UserError(
        f"{one} and {other}: plain text and rows cannot be mixed in one source (they are held out by different "
        "rules): prepare them apart"
    )


def num_heldout_documents(num_documents: int) -> int:
    """0.5 % of the documents (rounded), at least 50 and at most 10,000."""
    return min(max(round(DOCUMENT_FRACTION * num_documents), MIN_DOCUMENTS), MAX_DOCUMENTS)


class SmallestHashes:
    """Of a stream: the :data:`MAX_DOCUMENTS` smallest different hashes, how often each came, and how many came in all.

    One pass, memory O(limit): a hash among the smallest in the end was among them whenever it came by, also in each
    part of the stream that is taken by itself and put together by :meth:`merge`.
    """

    def __init__(self) -> None:
        self.total = 0
        self.counts: dict[bytes, int] = {}
        self._heap: list[int] = []  # negated, so that the largest kept hash is on top

    def add(self, digest: bytes) -> None:
        """One more text."""
        self.total += 1
        self._add(digest, 1)

    def merge(self, other: SmallestHashes) -> None:
        """What another part of the stream has seen."""
        self.total += other.total
        for digest, times in other.counts.items():
            self._add(digest, times)

    def _add(self, digest: bytes, times: int) -> None:
        if digest in self.counts:
            self.counts[digest] += times
        elif len(self._heap) < MAX_DOCUMENTS:
            self.counts[digest] = times
            heapq.heappush(self._heap, -int.from_bytes(digest, "big"))
        elif -self._heap[0] > (value := int.from_bytes(digest, "big")):
            self.counts[digest] = times
            del self.counts[(-heapq.heapreplace(self._heap, -value)).to_bytes(32, "big")]


def choose_documents(hashes: SmallestHashes) -> Holdout:
    """Choose among all documents of a source, whose hashes are given.

    Raises:
        UserError: there are too few different ones.
    """
    total, counts = hashes.total, hashes.counts
    if total < 2 * MIN_DOCUMENTS:
        raise UserError(
            f"only {total} documents, too few to hold out {MIN_DOCUMENTS}: give at least "
            f"{2 * MIN_DOCUMENTS}, or one plain-text file (.txt), which is held out by sections"
        )
    wanted = num_heldout_documents(total)
    # Copies of a text go together; one with so many that the split would grow far too large is passed over.
    most = min(2 * wanted, MAX_DOCUMENTS, total // 2)
    chosen, held = [], 0
    for digest in sorted(counts):
        if held >= wanted:
            break
        if held + counts[digest] <= most:
            chosen.append(digest)
            held += counts[digest]
    if held < MIN_DOCUMENTS:
        raise UserError(
            f"{total} documents hold too few different texts to keep {MIN_DOCUMENTS} apart: remove duplicates"
        )
    return Holdout("document", frozenset(chosen), total, held)


def _choose_sections(
    documents: Callable[[], Iterable[Document]], first_pass: Iterable[Document], tokenizer: Tokenizer
) -> Holdout:
    counts = Counter(text_hash(text) for document in first_pass for text in units_of(document))
    ranked, total = sorted(counts), counts.total()
    held = list(itertools.accumulate(counts[digest] for digest in ranked))
    half = sum(2 * n <= total for n in held)
    tenth = next(i for i, n in enumerate(held, start=1) if n >= math.ceil(SECTION_FRACTION * total))

    def lengths(chosen: frozenset[bytes]) -> Iterator[tuple[bytes, int]]:
        for document in documents():
            for text in units_of(document):
                if (digest := text_hash(text)) in chosen:
                    yield digest, len(tokenizer.encode(text))

    # Of a large source only the first 15,000 tokens are counted; of a small one, all that might be held out.
    running = itertools.accumulate(length for _, length in lengths(frozenset(ranked[:tenth])))
    if tenth <= half and any(tokens >= MIN_SECTION_TOKENS for tokens in running):
        return Holdout("section", frozenset(ranked[:tenth]), total, held[tenth - 1])
    tokens_of: Counter[bytes] = Counter()
    for digest, length in lengths(frozenset(ranked[:half])):
        tokens_of[digest] += length
    running = itertools.accumulate(tokens_of[digest] for digest in ranked[:half])
    needed = next((i for i, tokens in enumerate(running, start=1) if tokens >= MIN_SECTION_TOKENS), None)
    if needed is None:
        raise UserError(
            f"the text is too short: half of its {total} sections have {tokens_of.total():,} tokens, and at "
            f"least {MIN_SECTION_TOKENS:,} must be held out; give about 200 kB of text or more"
        )
    return Holdout("section", frozenset(ranked[:needed]), total, held[needed - 1])
