"""A SentencePiece ``.model`` (Llama 1 and 2, Mistral, tok512), through SentencePiece's own processor.

SentencePiece's ids are those a model was trained on. The fast tokenizer that transformers (5.24) makes from such a
file differs on runs of spaces: it merges them in another order (Llama-2) and keeps those that a model with
``remove_extra_whitespaces`` collapses (tok512). Of 1,000 C4 documents 2 differ, those with such runs, and of the first
200 TinyStories 3 (Llama-2) and 5 (tok512).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from llmstack.errors import UserError
from llmstack.tokenizer.base import REPLACE_EACH_BYTE, Tokenizer
from llmstack.tokenizer.workers import batch_threads

if TYPE_CHECKING:
    import sentencepiece

_SPACE = "\u2581"

# SentencePiece sees a text as one word, so its time per character grows with the length; longer texts are cut.
_CHUNK_CHARS = 20_000
_SINGLE_SPACE = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])")


class SentencePieceTokenizer(Tokenizer):
    """Control symbols are never read from text; symbols that the model's maker declared user-defined are.

    A character ``▁`` in a text becomes a space, and the model's own normalisation applies, so only texts that it
    leaves as they are come back unchanged from ``decode``.
    """

    name = "sentencepiece"
    _utf8_errors = REPLACE_EACH_BYTE

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """``files`` holds "tokenizer.model"; raises RuntimeError or UserError where it is not one."""
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_proto=files["tokenizer.model"])
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.vocab_size())]
        if not pieces:
            raise UserError("a SentencePiece model without pieces")
        self._pieces = pieces
        self._leading = _leading_rule(self._processor, pieces)
        # At a single space between two words a text may be cut and the space left out, since the next part gets its
        # own prefix space, provided that no piece reaches from a word over its end.
        self._can_cut = self._processor.normalize("a") == _SPACE + "a" and not any(
            re.search(f"[A-Za-z0-9]{_SPACE}", piece) for piece in pieces
        )
        super().__init__(
            files,
            vocab_size=len(pieces),
            bos_id=_id_or_none(self._processor.bos_id()),
            eos_id=_id_or_none(self._processor.eos_id()),
            special_ids=[i for i in range(len(pieces)) if self._processor.is_control(i)],
        )

    def _encode(self, text: str) -> list[int]:
        if len(text) > _CHUNK_CHARS:
            return self._encode_batch([text])[0]
        ids: list[int] = self._processor.encode(text)
        return ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        parts: list[str] = []
        counts: list[int] = []
        for text in texts:
            cut = _cut_at_spaces(text) if self._can_cut else [text]
            parts += cut
            counts.append(len(cut))
        ids: list[list[int]] = self._processor.encode(parts, num_threads=batch_threads())
        if len(parts) == len(texts):
            return ids
        rest = iter(ids)
        return [next(rest) if count == 1 else [*chain.from_iterable(islice(rest, count))] for count in counts]

    def library_batch(self, texts: list[str]) -> object:
        return self._processor.encode(texts, num_threads=batch_threads())

    def _special_name(self, token_id: int) -> str:
        return self._pieces[token_id]

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if self._processor.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)])
        if self._processor.is_unknown(token_id):
            surface: str = self._processor.decode([token_id])
            return surface.encode()
        return piece.replace(_SPACE, " ").encode()

    def _first_token_bytes(self, token_id: int) -> bytes:
        raw = self._byte_table[token_id]
        return raw[1:] if self._pieces[token_id].startswith(_SPACE) else raw

    def _definition(self) -> bytes:
        return self._files["tokenizer.model"]


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _leading_rule(processor: sentencepiece.SentencePieceProcessor, pieces: list[str]) -> Literal["keep", "one", "all"]:
    """How many spaces the processor leaves out at the start of a text; the model file says it, its API does not."""
    word = next((i for i, piece in enumerate(pieces) if piece.isalpha() and not processor.is_control(i)), None)
    space = processor.piece_to_id(_SPACE)
    if word is None or processor.is_unknown(space):
        return "one"
    kept = len(processor.decode([space, space, word])) - len(pieces[word])
    rules: dict[int, Literal["keep", "one", "all"]] = {2: "keep", 1: "one", 0: "all"}
    return rules[kept]


def _cut_at_spaces(text: str) -> list[str]:
    parts = []
    start = 0
    while len(text) - start > _CHUNK_CHARS:
        place = _SINGLE_SPACE.search(text, start + _CHUNK_CHARS)
        if place is None:
            break
        parts.append(text[start : place.start()])
        start = place.end()
    parts.append(text[start:])
    return parts
