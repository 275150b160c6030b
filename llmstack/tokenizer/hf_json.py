"""A Hugging Face ``tokenizer.json``, through ``tokenizers``.

BOS and EOS come from the first of: the template in ``tokenizer.json``; ``bos_token`` and ``eos_token`` of
``tokenizer_config.json`` beside it (null means none); ``bos_token_id`` and ``eos_token_id`` of ``config.json`` beside
it (of a list the first); a special token with one of the names in ``BOS_NAMES``, ``EOS_NAMES``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from llmstack.errors import UserError
from llmstack.tokenizer.rust_backend import RustTokenizer, byte_level_bytes, cuts_are_exact

BOS_NAMES = ("<|bos|>", "<|begin_of_text|>", "<s>")
EOS_NAMES = ("<|eos|>", "<|end_of_text|>", "</s>", "<|endoftext|>")

_SPACE = "\u2581"


class HfJsonTokenizer(RustTokenizer):
    """Truncation, padding and BPE dropout that the file may ask for are off: they would lose or vary ids.

    Added tokens that are special stay text inside a text; added tokens that are not (the runs of spaces of GPT-NeoX)
    are found in it, as the library does.
    """

    name = "hf-json"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """``files`` holds "tokenizer.json" and may hold "tokenizer_config.json" and, to read ids from, "config.json".

        Raises UserError, ValueError or what ``tokenizers`` raises where the content is not a tokenizer.
        """
        from tokenizers import Tokenizer as Backend

        spec = json.loads(files["tokenizer.json"])
        spec.update(truncation=None, padding=None)
        if "dropout" in spec["model"]:
            spec["model"]["dropout"] = None
        self._spec = spec
        self._to_bytes, self._leading = _decoding(spec.get("decoder"))
        self._prepare(Backend.from_str(json.dumps(spec)))
        self._can_cut = cuts_are_exact(spec)

        vocab = self._backend.get_vocab(with_added_tokens=True)
        self._added = {token["id"]: token["content"] for token in spec.get("added_tokens") or []}
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        special = {t["content"]: t["id"] for t in spec.get("added_tokens") or [] if t["special"]}
        config = _json_object(files, "tokenizer_config.json")
        model_config = _json_object(files, "config.json")
        bos_id, eos_id = (_marked_id(mark, spec, config, model_config, vocab, special) for mark in ("bos", "eos"))
        kept = {"tokenizer.json": files["tokenizer.json"]}
        kept["tokenizer_config.json"] = _with_marks(config, self._tokens, bos_id, eos_id)
        super().__init__(
            kept,
            vocab_size=max(vocab.values()) + 1,
            bos_id=bos_id,
            eos_id=eos_id,
            special_ids=[*special.values(), *(i for i in (bos_id, eos_id) if i is not None)],
        )

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        return self._to_bytes(self._tokens.get(token_id, ""))

    def _special_name(self, token_id: int) -> str:
        return self._added.get(token_id) or self._tokens[token_id]

    def _definition(self) -> bytes:
        parts = {key: self._spec.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        return json.dumps(parts, sort_keys=True).encode()


def _decoding(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], Literal["keep", "one"]]:
    """How a token of the vocabulary becomes bytes, and whether a text's first space is left out."""
    steps = [decoder] if decoder and decoder["type"] != "Sequence" else (decoder or {}).get("decoders", [])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, "keep"
    if kinds == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        mark = steps[0].get("replacement", _SPACE)
        return (lambda token: token.replace(mark, " ").encode()), "keep" if scheme == "never" else "one"
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace, strip = steps[0], steps[3] if len(steps) == 4 else {"start": 0, "stop": 0}
        is_known = replace["pattern"] == {"String": _SPACE} and replace["content"] == " "
        if is_known and strip["start"] in (0, 1) and strip["stop"] == 0 and strip.get("content", " ") == " ":
            return _byte_fallback_bytes, "one" if strip["start"] else "keep"
    raise UserError(f"decoder {kinds or None} is not supported; byte-level and SentencePiece-like ones are")


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE, " ").encode()


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise UserError(f"{name} beside it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{name} beside it is not a JSON object")
    return content


def _marked_id(
    mark: str,
    spec: dict[str, Any],
    config: dict[str, Any],
    model_config: dict[str, Any],
    vocab: dict[str, int],
    special: dict[str, int],
) -> int | None:
    token = _from_template(mark, spec.get("post_processor"))
    if token is None and f"{mark}_token" in config:
        token = config[f"{mark}_token"]
        if isinstance(token, dict):
            token = token["content"]
        if token is None:
            return None
    if token is not None:
        if token not in vocab:
            raise UserError(f"the {mark.upper()} token {token!r} is not in its vocabulary")
        return vocab[token]
    token_id = model_config.get(f"{mark}_token_id")
    if isinstance(token_id, list):
        token_id = token_id[0] if token_id else None
    if token_id is not None:
        if token_id not in vocab.values():
            raise UserError(f"{mark}_token_id {token_id} of config.json beside it is not in its vocabulary")
        return int(token_id)
    names = BOS_NAMES if mark == "bos" else EOS_NAMES
    return next((special[name] for name in names if name in special), None)


def _from_template(mark: str, processor: dict[str, Any] | None) -> str | None:
    """The special token that a TemplateProcessing puts first or last around a single text."""
    steps = (processor or {}).get("processors", [processor] if processor else [])
    for step in steps:
        if step["type"] == "TemplateProcessing":
            end = step["single"][0 if mark == "bos" else -1]
            return end["SpecialToken"]["id"] if "SpecialToken" in end else None
    return None


def _with_marks(config: dict[str, Any], tokens: dict[int, str], bos_id: int | None, eos_id: int | None) -> bytes:
    """``tokenizer_config.json`` that names both marks, so that a saved copy does not depend on other files."""
    marks = {
        mark: None if token_id is None else tokens[token_id]
        for mark, token_id in (("bos_token", bos_id), ("eos_token", eos_id))
    }
    return (json.dumps({**config, **marks}, indent=2, ensure_ascii=False) + "\n").encode()
