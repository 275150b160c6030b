"""GPT-2's ``vocab.json`` and ``merges.txt``, through ``tokenizers``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llmstack.errors import UserError
from llmstack.tokenizer.rust_backend import RustTokenizer, byte_level_bytes

END_OF_TEXT = "<|endoftext|>"


class Gpt2Tokenizer(RustTokenizer):
    """Byte-level BPE with GPT-2's split pattern.

    The two files do not name a split pattern, so those of another model with another pattern would be read wrongly;
    without ``<|endoftext|>`` they are refused. That token is GPT-2's BOS and EOS: here it is EOS alone.
    """

    name = "gpt2"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """``files`` holds "vocab.json" and "merges.txt"; raises UserError or ValueError for what they cannot be."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        vocab = json.loads(files["vocab.json"])
        if END_OF_TEXT not in vocab:
            raise UserError(f"not GPT-2's vocabulary, it has no {END_OF_TEXT}; give the model's tokenizer.json")
        eos_id = vocab[END_OF_TEXT]
        backend = Backend(models.BPE(vocab=vocab, merges=_read_merges(files["merges.txt"])))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        self._can_cut = True
        self._prepare(backend)
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        super().__init__(files, vocab_size=max(self._tokens) + 1, bos_id=None, eos_id=eos_id, special_ids={eos_id})

    def _token_bytes(self, token_id: int) -> bytes:
        return byte_level_bytes(self._tokens.get(token_id, ""))

    def _special_name(self, token_id: int) -> str:
        return self._tokens[token_id]

    def _definition(self) -> bytes:
        vocab = json.dumps(json.loads(self._files["vocab.json"]), sort_keys=True)
        return json.dumps([vocab, _read_merges(self._files["merges.txt"])]).encode()


def _read_merges(content: bytes) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, separator, right = line.partition(" ")
        if not separator or not left or not right or " " in right:
            raise UserError(f"merges.txt:{number}: expected two tokens, found {line[:60]!r}")
        merges.append((left, right))
    return merges
