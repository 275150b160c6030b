"""What the kinds that run on the ``tokenizers`` library have in common."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from llmstack.tokenizer.base import Tokenizer, without_lone_surrogates
from llmstack.tokenizer.workers import make_fork_safe

if TYPE_CHECKING:
    import tokenizers

# Longer texts are cut, since the library's time per character grows with the length of one input.
_CHUNK_CHARS = 20_000

# Split patterns for which `_EXACT_CUT` was checked: GPT-2's is built into the ByteLevel pre-tokeniser.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

# Between a letter or digit and one of these characters every pattern above ends a pre-token, none looks behind, and
# the only look-ahead is for the end of white space. So the two sides of such a place can be encoded apart.
_EXACT_CUT = re.compile(r"(?<=[^\W_])(?=[ \n。、，！？])")


class RustTokenizer(Tokenizer):
    """Encoding through ``tokenizers``; subclasses say how the backend is made and how tokens become bytes."""

    _backend: tokenizers.Tokenizer
    _can_cut: bool = False

    def _prepare(self, backend: tokenizers.Tokenizer) -> None:
        make_fork_safe()
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend

    def _encode(self, text: str) -> list[int]:
        return self._encode_batch([text])[0]

    def encode_marked(self, text: str) -> list[int]:
        """As the base class says; the library knows what its special tokens do to the spaces around them."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        if not known.issuperset(self.special_tokens):
            return super().encode_marked(text)
        self._backend.encode_special_tokens = False
        try:
            return self._backend.encode(without_lone_surrogates(text), add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = True

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            cut = cut_exactly(text) if self._can_cut else [text]
            pieces += cut
            counts.append(len(cut))
        # The "fast" call leaves out offsets, which cost as much as the ids.
        encodings = iter(self._backend.encode_batch_fast(pieces, add_special_tokens=False))
        return [_joined([next(encodings).ids for _ in range(count)]) for count in counts]

    def library_batch(self, texts: list[str]) -> object:
        return [one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


def _joined(parts: list[list[int]]) -> list[int]:
    return parts[0] if len(parts) == 1 else [token_id for part in parts for token_id in part]


def cut_exactly(text: str, size: int = _CHUNK_CHARS) -> list[str]:
    """Pieces of about ``size`` characters whose ids, joined, are those of ``text``; longer where no place is exact."""
    pieces = []
    start = 0
    while len(text) - start > size:
        place = _EXACT_CUT.search(text, start + size)
        if place is None:
            break
        pieces.append(text[start : place.start()])
        start = place.start()
    pieces.append(text[start:])
    return pieces


def cuts_are_exact(spec: dict[str, Any]) -> bool:
    """Whether `cut_exactly` holds for a ``tokenizer.json``: a known split pattern and no token across a cut."""
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):
        return False
    for token in spec.get("added_tokens") or []:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or _EXACT_CUT.search(token["content"])):
            return False
    return _known_split(spec.get("pre_tokenizer") or {})


def _known_split(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer.get("type") == "ByteLevel":
        return bool(pre_tokenizer.get("use_regex", True)) and not pre_tokenizer.get("add_prefix_space")
    steps = pre_tokenizer.get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    return (
        split.get("pattern", {}).get("Regex") in (LLAMA3_PATTERN, QWEN2_PATTERN)
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        and not byte_level.get("use_regex", True)
        and not byte_level.get("add_prefix_space")
    )


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = {chr(byte): byte for byte in printable}
    stand_ins.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return stand_ins


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one that holds other characters than stand-ins is plain text."""
    try:
        return bytes(_byte_of_character()[character] for character in token)
    except KeyError:
        return token.encode()
