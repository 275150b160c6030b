"""Questions from the embedded corpus, the Python language reference: which of four texts goes on?"""

import random
from typing import Any

import datasets

from llmstack.data.holdout import SECTION_FRACTION, text_hash, units_of
from llmstack.data.sources import EMBEDDED, iterate_documents

CONTEXT, CONTINUATION, CHOICES = 300, 60, 4
"""Characters, characters, and how many continuations there are to choose from."""


def questions(**unused: Any) -> datasets.DatasetDict:
    """The split ``test``; the same questions wherever the corpus is the same.

    They are of the sections with the smallest hashes, which every held-out split of this corpus has, whatever its
    tokenizer. Wrong choices are the right ones of other sections.
    """
    sections = [text for document in iterate_documents(EMBEDDED) for text in units_of(document)]
    held_out = sorted(sections, key=text_hash)[: int(SECTION_FRACTION * len(sections))]
    pieces = [(number, *piece) for number, text in enumerate(held_out) for piece in _pieces(text)]
    draw = random.Random(0)
    rows = []
    for section, context, right in pieces:
        wrong = draw.sample([other for where, _, other in pieces if where != section and other != right], CHOICES - 1)
        answer = draw.randrange(CHOICES)
        rows.append({"context": context, "choices": [*wrong[:answer], right, *wrong[answer:]], "answer": answer})
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def _pieces(text: str) -> list[tuple[str, str]]:
    """Contexts that end with a word, and the words that follow."""
    found, start = [], 0
    while start + CONTEXT + CONTINUATION < len(text):
        cut = text.find(" ", start + CONTEXT)
        end = text.find(" ", cut + CONTINUATION)
        if cut < 0 or end < 0:
            break
        context, continuation = text[start:cut].strip(), " " + " ".join(text[cut:end].split())
        if context and continuation.strip():
            found.append((context, continuation))
        start = end
    return found
