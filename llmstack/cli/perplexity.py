"""``llmstack perplexity``: token-level perplexity of a checkpoint over a text or its documents."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import output_file
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.checkpoint import Source
    from llmstack.evaluation.perplexity import TokenSequence
    from llmstack.model import Llama
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

_NAMES = ("c4", "wikitext2")
_SEPARATOR = "\n\n"
_DEFAULT_WINDOW = 2048


def add_parser(subparsers: Any) -> None:
    """Register ``perplexity``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "perplexity",
        help="token-level perplexity over a text",
        description="Token-level perplexity and bits per byte. Without --per-document the documents are joined by a "
        "blank line to one text, which is scored in windows, each token once; its first token follows BOS.",
    )
    parser.add_argument("ckpt", metavar="CKPT", help="run folder, checkpoint, or Hugging Face Llama folder")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="FILE",
        help='file, glob or folder: .txt, .jsonl with a "text" field (each also .gz, .zst), or .parquet',
    )
    parser.add_argument(
        "--per-document", action="store_true", help="score each document by itself, after BOS (default: one text)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="with --per-document: cut BOS and document to N tokens together (default: no cut)",
    )
    parser.add_argument("--max-documents", type=int, metavar="N", help="only the first N documents (default: all)")
    parser.add_argument(
        "--window",
        type=int,
        metavar="L",
        help="most tokens that the model sees at once (default: the block length of its training where that is known, "
        f"else its positions, {_DEFAULT_WINDOW} at most)",
    )
    parser.add_argument(
        "--stride", type=int, metavar="S", help="tokens between two windows of a longer text (default: the window)"
    )
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer file or folder (default: the checkpoint's)")
    parser.add_argument(
        "--weights",
        choices=("fp32", "bf16", "int8", "int4"),
        default="fp32",
        help="as which they are used; int8 and int4 as `generate` does, in bf16 around them (default: %(default)s)",
    )
    parser.add_argument("--output", type=output_file, metavar="F.json", help="also write the result to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the result; raises UserError for whatever is wrong with the arguments, the data or the checkpoint."""
    import torch

    from llmstack.checkpoint import load_model, resolve
    from llmstack.checkpoint.files import write_atomically
    from llmstack.evaluation.perplexity import score

    _check(args)
    source = resolve(args.ckpt)
    tokenizer, policy = _tokenizer(args, source)
    window = args.window if args.window is not None else _default_window(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _as_weights(load_model(source, device=device), args.weights)
    with _Progress() as progress:
        sequences = _sequences(args, tokenizer, policy)
        result = score(model, sequences, window=window, stride=args.stride, progress=progress)
    if result.tokens == 0:
        raise UserError(f"{args.dataset}: no token to score")
    bits = result.bits_per_byte
    print(
        f"{result.nats_per_token:.4f} nats per token, perplexity {result.perplexity:.4f}, "
        f"{'bits per byte unknown (cut documents)' if bits is None else f'{bits:.4f} bits per byte'}; "
        f"{result.tokens} tokens of {result.documents} {'documents' if args.per_document else 'text'}, window {window}"
    )
    if args.output is not None:
        record = {
            "nats_per_token": result.nats_per_token,
            "perplexity": result.perplexity,
            "bits_per_byte": bits,
            "tokens": result.tokens,
            "bytes": result.num_bytes,
            "documents": result.documents,
            "per_document": args.per_document,
            "max_tokens": args.max_tokens,
            "window": window,
            "stride": args.stride or window,
            "bos": policy.bos,
            "weights": args.weights,
            "dataset": args.dataset,
            "checkpoint": str(source.path),
            "tokenizer": tokenizer.fingerprint,
        }
        write_atomically(args.output, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0


def _as_weights(model: Llama, weights: str) -> Llama:
    if weights == "fp32":
        return model
    from llmstack.inference.generate import inference_form

    return inference_form(model.bfloat16(), weights=None if weights == "bf16" else weights)  # type: ignore[arg-type]


def _check(args: argparse.Namespace) -> None:
    if args.dataset in _NAMES and not Path(args.dataset).exists():
        raise UserError(f"--dataset {args.dataset} is not on this machine: give the path of a local file of it")
    if args.max_tokens is not None and not args.per_document:
        raise UserError("--max-tokens cuts documents: it needs --per-document")
    if args.max_tokens is not None and args.max_tokens < 2:
        raise UserError(f"--max-tokens is {args.max_tokens}; at least 2 are needed, the first has no prediction")
    if args.max_documents is not None and args.max_documents < 1:
        raise UserError(f"--max-documents is {args.max_documents}; it must be at least 1")


def _tokenizer(args: argparse.Namespace, source: Source) -> tuple[Tokenizer, BosEosPolicy]:
    """The tokenizer, and the policy that was stored with it or is its default."""
    from llmstack.tokenizer import BosEosPolicy, load_policy, load_tokenizer

    path = Path(args.tokenizer) if args.tokenizer is not None else source.tokenizer
    if path is None:
        raise UserError(f"{args.ckpt} has no tokenizer: give one with --tokenizer")
    tokenizer = load_tokenizer(path)
    policy = load_policy(path) if path.is_dir() else None
    return tokenizer, policy or BosEosPolicy.default(tokenizer)


def _default_window(source: Source) -> int:
    """Beyond the lengths it was trained on a model can be far worse than it is."""
    state = source.checkpoint.state if source.checkpoint is not None else {}
    trained = state.get("data", {}).get("block_size")
    return min(trained or _DEFAULT_WINDOW, source.config.max_position_embeddings)


def _sequences(args: argparse.Namespace, tokenizer: Tokenizer, policy: BosEosPolicy) -> Iterator[TokenSequence]:
    from llmstack.data.sources import iterate_documents
    from llmstack.evaluation.perplexity import token_sequence

    texts = (document.text for document in islice(iterate_documents(args.dataset), args.max_documents))
    if args.per_document:
        return (token_sequence(text, tokenizer, policy, args.max_tokens) for text in texts)
    return iter([token_sequence(_SEPARATOR.join(texts), tokenizer, policy)])


class _Progress:
    """The number of windows scored so far, on standard error, once a second where that is a terminal."""

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._open = False

    def __enter__(self) -> Callable[[int], None]:
        return self._show

    def __exit__(self, *exception: object) -> None:
        if self._open:
            print(file=sys.stderr)

    def _show(self, windows: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._shown > 1:
            print(f"\r{windows} windows scored", end="", file=sys.stderr, flush=True)
            self._shown, self._open = time.monotonic(), True
