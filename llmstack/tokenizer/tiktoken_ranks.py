"""Llama 3's ``tokenizer.model``: a tiktoken file of base64 tokens and ranks, with 256 special tokens behind them.

The file holds the ranks alone. Split pattern, special tokens and the cutting of long texts are those of Meta's
reference code (llama-models, ``models/llama3/tokenizer.py``, Llama 3.1 and later; the first Llama 3 called some of
128002..128255 by other names, with the same BOS, EOS, header and end-of-turn ids).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

from llmstack.errors import UserError
from llmstack.tokenizer.base import Tokenizer
from llmstack.tokenizer.rust_backend import LLAMA3_PATTERN
from llmstack.tokenizer.workers import batch_threads

NUM_RANKS = 128_000
_NAMED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
SPECIAL_TOKENS = _NAMED + tuple(f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(_NAMED)))

# The reference encodes at most so many characters at once, and so many of one run with or without white space: the
# library's regular expression overflows its stack at about a million spaces. The ids at the cuts depend on both.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")

RANK_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]+)")


class Llama3Tokenizer(Tokenizer):
    """Ids equal those of the reference code for every text, however long."""

    name = "llama3-tiktoken"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """``files`` holds "tokenizer.model"; raises UserError where it is not Llama 3's kind of file."""
        from tiktoken import Encoding

        ranks = read_ranks(files["tokenizer.model"])
        if len(ranks) != NUM_RANKS:
            raise UserError(
                f"{len(ranks)} ranks, but Llama 3 has {NUM_RANKS}; a ranks file names neither split pattern nor "
                "special tokens, so give another model's tokenizer.json"
            )
        special = {token: NUM_RANKS + i for i, token in enumerate(SPECIAL_TOKENS)}
        self._encoding = Encoding(self.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self._tokens = {rank: token for token, rank in ranks.items()}
        super().__init__(
            files,
            vocab_size=NUM_RANKS + len(special),
            bos_id=special["<|begin_of_text|>"],
            eos_id=special["<|end_of_text|>"],
            special_ids=special.values(),
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in reference_parts(text):
            ids += self._encoding.encode_ordinary(part)
        return ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        threads = batch_threads()
        if threads == 1:
            return [self._encode(text) for text in texts]
        parts_of_texts = [reference_parts(text) for text in texts]
        parts = [part for parts in parts_of_texts for part in parts]
        ids = iter(self._encoding.encode_ordinary_batch(parts, num_threads=threads))
        return [
            next(ids) if len(parts) == 1 else [token_id for _ in parts for token_id in next(ids)]
            for parts in parts_of_texts
        ]

    def library_batch(self, texts: list[str]) -> object:
        return self._encoding.encode_ordinary_batch(texts, num_threads=batch_threads())

    def _token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def _special_name(self, token_id: int) -> str:
        return SPECIAL_TOKENS[token_id - NUM_RANKS]

    def _definition(self) -> bytes:
        return self._files["tokenizer.model"]


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Token bytes -> rank; raises UserError with the line that is wrong, or where ranks are not 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        match = RANK_LINE.fullmatch(line)
        try:
            if match is None or int(match[2]) != number - 1:
                raise ValueError(f"expected a base64 token and rank {number - 1}")
            ranks[base64.b64decode(match[1], validate=True)] = number - 1
        except (binascii.Error, ValueError) as error:
            raise UserError(f"line {number}: {error}, found {line[:60]!r}") from error
    return ranks


def reference_parts(text: str) -> list[str]:
    """The parts that the reference code encodes one by one."""
    parts = []
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        parts += _limit_runs(text[start : start + MAX_ENCODE_CHARS])
    return parts


def _limit_runs(text: str) -> list[str]:
    """Cut inside runs longer than MAX_RUN_CHARS, with or without white space, every MAX_RUN_CHARS of the run."""
    if not _may_hold_long_run(text):
        return [text]
    parts = []
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            parts.append(text[start:cut])
            start = cut
    parts.append(text[start:])
    return parts


def _may_hold_long_run(text: str) -> bool:
    """A long run covers one of these steps wholly; asking so costs nothing beside encoding."""
    step = MAX_RUN_CHARS // 2
    for start in range(0, len(text) - step + 1, step):
        part = text[start : start + step]
        if part.isspace() or part.split(None, 1)[0] == part:
            return True
    return False
