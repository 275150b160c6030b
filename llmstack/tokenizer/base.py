"""What every tokenizer offers, the BOS/EOS policy, and incremental decoding.

All kinds share one definition of decoding: each id stands for some bytes (special ids for none), the bytes are joined
and read as UTF-8. Decoding a whole sequence and decoding it id by id therefore give the same text by construction.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from llmstack.errors import UserError

POLICY_FILE = "tokenizer_policy.json"

# File names by which a folder is recognised as holding a tokenizer of another kind than the one being saved.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# SentencePiece writes one U+FFFD for each byte that is not part of a character; Python's "replace" and the other
# libraries write one for each maximal broken sequence.
REPLACE_EACH_BYTE = "llmstack.replace-each-byte"
codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


class Tokenizer(ABC):
    """A fixed mapping from text to ids and back.

    ``encode`` adds neither BOS nor EOS (``BosEosPolicy`` does) and reads the name of a special token in a text as the
    plain text it is. Where BOS and EOS would be one token (GPT-2), it closes a document and ``bos_id`` is None.

    Attributes:
        name: the kind.
        vocab_size: number of ids, the largest id + 1: what an embedding needs at least.
        bos_id, eos_id: None where the tokenizer has none.
        special_ids: ids that no text encodes to and that decode to nothing.
    """

    name: ClassVar[str]
    _leading: Literal["keep", "one", "all"] = "keep"
    _utf8_errors: str = "replace"

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        vocab_size: int,
        bos_id: int | None,
        eos_id: int | None,
        special_ids: Iterable[int],
    ) -> None:
        self._files = dict(files)
        self.vocab_size = vocab_size
        self.bos_id = None if bos_id == eos_id else bos_id
        self.eos_id = eos_id
        self.special_ids = frozenset(special_ids)

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[dict[str, bytes]]]:
        """Pickle as the defining files, since not every library's object can travel to a worker process."""
        return type(self), (self._files,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, bos_id={self.bos_id}, eos_id={self.eos_id})"

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of a text without lone surrogates."""

    @abstractmethod
    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, by the library's own batch call."""

    @abstractmethod
    def library_batch(self, texts: list[str]) -> object:
        """The library's batch call on whole texts and nothing around it: what tokenising can cost at least."""

    @abstractmethod
    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes an id that is not special stands for inside a text."""

    @abstractmethod
    def _special_name(self, token_id: int) -> str:
        """The name of a special id."""

    @abstractmethod
    def _definition(self) -> bytes:
        """What defines the mapping from text to ids, in a form that does not depend on the file's layout."""

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special ids by the names that chat templates write for them."""
        return {self._special_name(token_id): token_id for token_id in sorted(self.special_ids)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the kind, the mapping from text to ids, and the BOS and EOS ids."""
        head = json.dumps([self.name, self.vocab_size, self.bos_id, self.eos_id])
        return hashlib.sha256(head.encode() + b"\n" + self._definition()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; [] for "". A lone surrogate, which no UTF-8 text can hold, is read as U+FFFD."""
        return self._encode(without_lone_surrogates(text)) if text else []

    def encode_marked(self, text: str) -> list[int]:
        """``encode`` of a text in which the names of special tokens mean these, as a chat template writes it."""
        names = "|".join(map(re.escape, self._names_longest_first))
        parts = re.split(f"({names})", text) if names else [text]
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += [self.special_tokens[part]] if number % 2 else self.encode(part)
        return ids

    @cached_property
    def _names_longest_first(self) -> list[str]:
        return sorted(self.special_tokens, key=len, reverse=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of every text, on all cores in the main process and on one core in a worker process."""
        return self._encode_batch([without_lone_surrogates(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special ids add nothing, bytes that are not UTF-8 become U+FFFD.

        Raises UserError for an id that the tokenizer does not have.
        """
        stream = _ByteStream(self)
        return b"".join([stream.feed(token_id) for token_id in ids]).decode("utf-8", self._utf8_errors)

    def _first_token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for where nothing has been written yet."""
        raw = self._byte_table[token_id]
        return raw if self._leading == "keep" else raw.removeprefix(b" ")

    @cached_property
    def _byte_table(self) -> list[bytes]:
        return [b"" if i in self.special_ids else self._token_bytes(i) for i in range(self.vocab_size)]

    def save(self, directory: str | Path, policy: BosEosPolicy | None = None) -> None:
        """Write the defining files, so that ``load_tokenizer(directory)`` gives the same ids and fingerprint.

        With ``policy`` also ``tokenizer_policy.json``; without, one that lies there is removed, since it would speak of
        another tokenizer. Raises UserError where the folder holds a tokenizer of another kind.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            if name not in self._files and (directory / name).exists():
                raise UserError(f"{directory / name}: belongs to another tokenizer; save {self.name} elsewhere")
        for name, content in self._files.items():
            (directory / name).write_bytes(content)
        policy_path = directory / POLICY_FILE
        if policy is None:
            policy_path.unlink(missing_ok=True)
        else:
            policy_path.write_text(json.dumps(policy.to_dict()) + "\n", encoding="utf-8")


def without_lone_surrogates(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class _ByteStream:
    """Bytes of one id after another, knowing whether anything has been written yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer._byte_table
        self._special = tokenizer.special_ids
        self._at_start = tokenizer._leading != "keep"

    def feed(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._table):
            raise UserError(f"id {token_id} is outside this tokenizer's vocabulary, 0 to {len(self._table) - 1}")
        if not self._at_start or token_id in self._special:
            return self._table[token_id]
        raw = self._tokenizer._first_token_bytes(token_id)
        self._at_start = self._tokenizer._leading == "all" and not raw
        return raw


class StreamDecoder:
    """Decodes ids as they come; what ``push`` and ``flush`` return joins to ``tokenizer.decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = _ByteStream(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer._utf8_errors)

    def push(self, token_id: int) -> str:
        """The text that became final with this id; "" while a character is incomplete."""
        return self._utf8.decode(self._bytes.feed(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class BosEosPolicy:
    """Which marks a document gets: the one place that adds BOS and EOS.

    Attributes:
        bos: put BOS before the first id.
        eos: put EOS after the last id.
    """

    bos: bool
    eos: bool

    @classmethod
    def default(cls, tokenizer: Tokenizer) -> BosEosPolicy:
        """BOS where the tokenizer has one, EOS where it has one."""
        return cls(bos=tokenizer.bos_id is not None, eos=tokenizer.eos_id is not None)

    def wrap(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        """``ids`` with the marks that are wanted and not yet there, so wrapping twice is wrapping once.

        Raises UserError where the policy wants a mark that the tokenizer does not have.
        """
        wrapped = list(ids)
        if self.bos and wrapped[:1] != [_mark(tokenizer.bos_id, "BOS", tokenizer)]:
            wrapped.insert(0, _mark(tokenizer.bos_id, "BOS", tokenizer))
        if self.eos and wrapped[-1:] != [_mark(tokenizer.eos_id, "EOS", tokenizer)]:
            wrapped.append(_mark(tokenizer.eos_id, "EOS", tokenizer))
        return wrapped

    def to_dict(self) -> dict[str, bool]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> BosEosPolicy:
        """The inverse of ``to_dict``; raises UserError for anything else than two booleans."""
        bos, eos = values.get("bos"), values.get("eos")
        if set(values) != {"bos", "eos"} or not isinstance(bos, bool) or not isinstance(eos, bool):
            raise UserError(f'a BOS/EOS policy is {{"bos": true or false, "eos": true or false}}, not {dict(values)}')
        return cls(bos=bos, eos=eos)


def _mark(token_id: int | None, mark: str, tokenizer: Tokenizer) -> int:
    if token_id is None:
        raise UserError(f"the BOS/EOS policy wants {mark}, but this {tokenizer.name} tokenizer has none")
    return token_id


def load_policy(directory: str | Path) -> BosEosPolicy | None:
    """The policy that ``Tokenizer.save`` wrote into a folder; None where there is none."""
    path = Path(directory) / POLICY_FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise UserError("not a JSON object")
        return BosEosPolicy.from_dict(values)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
