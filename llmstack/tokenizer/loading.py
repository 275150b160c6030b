"""Finding out what kind of tokenizer a path holds, by file name and content.

In a folder the first of these is taken:

1. a SentencePiece or ranks file (``tokenizer.model``, or the only ``*.model``, ``*.model.v<N>``): it is what the
   model was trained with, and a ``tokenizer.json`` beside it is a conversion that may differ (see
   ``sentencepiece_model``). Where that ``tokenizer.json`` has ids which a SentencePiece file lacks (tokens added
   later), the model was trained further with it, and it is taken;
2. ``tokenizer.json``;
3. ``vocab.json`` with ``merges.txt``, which say less than a ``tokenizer.json`` (no split pattern).

A path to a file takes exactly that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmstack.errors import UserError
from llmstack.tokenizer.base import Tokenizer

_KINDS = "tokenizer.json, a SentencePiece .model, Llama 3's tokenizer.model, or vocab.json with merges.txt"
_MODEL_NAME = re.compile(r".+\.model(\.v\d+)?")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file or folder.

    Raises UserError with the path where there is none, the file is empty or broken, or the kind is not known.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such tokenizer file or folder")
    return _load_folder(path) if path.is_dir() else _load_file(path)


def _load_folder(folder: Path) -> Tokenizer:
    model = _model_file(folder)
    hf_json = folder / "tokenizer.json"
    if model is not None:
        tokenizer = _load_file(model)
        if not hf_json.exists() or tokenizer.name != "sentencepiece":
            return tokenizer
        return tokenizer if _highest_id(hf_json) < tokenizer.vocab_size else _load_file(hf_json)
    if hf_json.exists():
        return _load_file(hf_json)
    if (folder / "vocab.json").exists() or (folder / "merges.txt").exists():
        return _load_gpt2(folder)
    raise UserError(f"{folder}: no tokenizer in this folder ({_KINDS})")


def _model_file(folder: Path) -> Path | None:
    if (folder / "tokenizer.model").exists():
        return folder / "tokenizer.model"
    models = sorted(path for path in folder.iterdir() if _MODEL_NAME.fullmatch(path.name) and path.is_file())
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise UserError(f"{folder}: several tokenizers ({names}); give the path of one")
    return models[0] if models else None


def _load_file(path: Path) -> Tokenizer:
    if path.name in ("vocab.json", "merges.txt"):
        return _load_gpt2(path.parent)
    content = _read(path)
    if content.lstrip().startswith(b"{"):
        return _load_hf_json(path, content)

    from llmstack.tokenizer.tiktoken_ranks import RANK_LINE, Llama3Tokenizer

    files = {"tokenizer.model": content}
    if RANK_LINE.fullmatch(content.split(b"\n", 1)[0].rstrip(b"\r")):
        return _built(path, "a file of tiktoken ranks", lambda: Llama3Tokenizer(files))
    # Field 1, length-delimited: every SentencePiece model starts with its first piece.
    if content.startswith(b"\n"):
        from llmstack.tokenizer.sentencepiece_model import SentencePieceTokenizer

        return _built(path, "a SentencePiece model", lambda: SentencePieceTokenizer(files))
    raise UserError(f"{path}: not a tokenizer of a known kind ({_KINDS})")


def _load_hf_json(path: Path, content: bytes) -> Tokenizer:
    from llmstack.tokenizer.hf_json import HfJsonTokenizer

    if not isinstance(_json_object(path, content).get("model"), dict):
        raise UserError(f"{path}: JSON, but not a tokenizer.json (no model in it)")
    files = {"tokenizer.json": content}
    for name in ("tokenizer_config.json", "config.json"):
        if (path.parent / name).is_file():
            files[name] = _read(path.parent / name)
    return _built(path, "a tokenizer.json", lambda: HfJsonTokenizer(files))


def _load_gpt2(folder: Path) -> Tokenizer:
    from llmstack.tokenizer.gpt2 import Gpt2Tokenizer

    files = {}
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; vocab.json and merges.txt belong together")
        files[name] = _read(folder / name)
    _json_object(folder / "vocab.json", files["vocab.json"])
    return _built(folder, "a GPT-2 tokenizer", lambda: Gpt2Tokenizer(files))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not content:
        raise UserError(f"{path}: is empty")
    return content


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: broken JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: broken JSON (not UTF-8)") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: broken tokenizer file (a JSON object was expected)")
    return value


def _highest_id(hf_json: Path) -> int:
    spec = _json_object(hf_json, _read(hf_json))
    added = [token["id"] for token in spec.get("added_tokens") or []]
    return max([*added, len((spec.get("model") or {}).get("vocab", ())) - 1])


def _built(path: Path, what: str, build: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        return build()
    except ImportError:
        raise
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # the libraries have no common class for "not my kind of file"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: broken, or not {what} ({reason})") from error
