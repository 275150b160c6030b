"""Training a byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable

from llmstack.errors import UserError
from llmstack.tokenizer.hf_json import HfJsonTokenizer
from llmstack.tokenizer.workers import make_fork_safe

BOS_TOKEN = "<|bos|>"
EOS_TOKEN = "<|eos|>"
MIN_VOCAB_SIZE = 256 + 2


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> HfJsonTokenizer:
    """Byte-level BPE (GPT-2's split pattern) learned from ``texts``; the same texts give the same tokenizer.

    Ids 0 and 1 are BOS and EOS, 2 to 257 the bytes, then the merges in the order learned. The result has fewer than
    ``vocab_size`` ids where the texts offer no more merges.

    Raises UserError for a ``vocab_size`` below 258 (bytes and special tokens) and for texts without a character.
    """
    check_vocab_size(vocab_size)
    make_fork_safe()
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    count = 0

    def counted() -> Iterable[str]:
        nonlocal count
        for text in texts:
            count += len(text)
            yield text

    backend.train_from_iterator(counted(), trainer)
    if count == 0:
        raise UserError("nothing to train a tokenizer on: the texts hold no character")
    marks = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    return HfJsonTokenizer(
        {
            "tokenizer.json": backend.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(marks).encode(),
        }
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError for a size that does not hold the bytes and the special tokens."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocabulary size {vocab_size} is too small: 256 bytes and 2 special tokens make {MIN_VOCAB_SIZE}"
        )
    if vocab_size >= 2**31:
        raise UserError(f"vocabulary size {vocab_size} is too large: ids are 32-bit numbers")
