"""``llmstack tokenizer train``: a byte-level BPE from text files."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.tokenizer import Tokenizer

REPORT_FILE = "training.json"
_BATCH_DOCUMENTS = 256


def add_parser(subparsers: Any) -> None:
    """Register ``tokenizer``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser("tokenizer", help="train a tokenizer", description="Train a tokenizer.")
    actions = parser.add_subparsers(dest="action", required=True)
    train = actions.add_parser(
        "train",
        help="train a byte-level BPE on text files",
        description="Train a byte-level BPE with <|bos|> and <|eos|>. The output folder is a tokenizer for every "
        f"command that takes one; {REPORT_FILE} in it says what it was trained on.",
    )
    train.add_argument(
        "--files",
        nargs="+",
        required=True,
        metavar="F",
        help='plain text or .jsonl with a "text" field, also compressed (.gz, .zst)',
    )
    train.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="ids wanted, at least 258: 256 bytes and 2 special tokens; fewer come where the text is too small",
    )
    train.add_argument("--out", required=True, metavar="DIR", help="folder to write, new or empty")
    train.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Train, then put the whole folder in place at once; raises UserError before anything is written."""
    from llmstack.tokenizer import BosEosPolicy, train_tokenizer
    from llmstack.tokenizer.training import check_vocab_size

    out = Path(args.out)
    check_vocab_size(args.vocab_size)
    _check_out(out)
    for file in args.files:
        if not Path(file).exists():
            raise UserError(f"{file}: no such file to train on")

    tokenizer = train_tokenizer(_texts(args.files), args.vocab_size)
    report = _measure(tokenizer, args.files)
    with _folder_in_place(out) as folder:
        tokenizer.save(folder, BosEosPolicy.default(tokenizer))
        (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    fewer = "" if tokenizer.vocab_size == args.vocab_size else f" (of {args.vocab_size} asked: no more merges)"
    print(
        f"{out}: {report['vocab_size']} ids{fewer}, {report['documents']} documents, {report['bytes']} bytes, "
        f"{report['bytes_per_token']:.3f} bytes per token"
    )
    return 0


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; --out names a folder to write")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out}: exists and is not empty; give a new folder")


def _texts(files: list[str]) -> Iterator[str]:
    from llmstack.data.sources import iterate_documents

    return (document.text for document in iterate_documents(files))


def _measure(tokenizer: Tokenizer, files: list[str]) -> dict[str, Any]:
    """What the tokenizer makes of its own training text; bytes are those of the text in UTF-8."""
    documents = num_bytes = num_tokens = 0
    texts = _texts(files)
    while batch := list(itertools.islice(texts, _BATCH_DOCUMENTS)):
        documents += len(batch)
        num_bytes += sum(len(text.encode("utf-8", "replace")) for text in batch)
        num_tokens += sum(len(ids) for ids in tokenizer.encode_batch(batch))
    return {
        "vocab_size": tokenizer.vocab_size,
        "documents": documents,
        "bytes": num_bytes,
        "tokens": num_tokens,
        "bytes_per_token": num_bytes / num_tokens,
        "fingerprint": tokenizer.fingerprint,
        "files": files,
    }


@contextlib.contextmanager
def _folder_in_place(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the block ends well and vanishes when it does not."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        _check_out(out)
        folder.replace(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
