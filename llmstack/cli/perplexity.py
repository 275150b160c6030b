"""``llmstack perplexity``: perplexity of a checkpoint over a text or its documents, by token, word and byte."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import output_file, positive
from llmstack.cli.ranks import join, together
from llmstack.errors import UserError
from llmstack.hub import CORPORA, find_split

if TYPE_CHECKING:
    from llmstack.checkpoint import Source
    from llmstack.evaluation.perplexity import Perplexity, TokenSequence
    from llmstack.model import Llama
    from llmstack.tokenizer import BosEosPolicy, Tokenizer

_SEPARATOR = "\n\n"
_DEFAULT_WINDOW = 2048


def add_parser(subparsers: Any) -> None:
    """Register ``perplexity``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "perplexity",
        help="perplexity over a text",
        description="Perplexity by token and by word, and bits per byte. A text, or with --per-document each of its "
        "documents, follows BOS and is scored in windows, each token once. Under torchrun or srun the ranks share the "
        "windows out.",
    )
    parser.add_argument("ckpt", metavar="CKPT", help="run folder, checkpoint, or Hugging Face Llama folder")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="DATA",
        help='file, glob or folder: .txt, .jsonl with a "text" field (each also .gz, .zst), or .parquet; or a set that '
        "`fetch` has brought: c4 (its validation split), wikitext2 (its test split), or NAME:SPLIT",
    )
    parser.add_argument(
        "--data-root", metavar="DIR", help="folder of `fetch` (default: $LLMSTACK_DATA, or ~/.cache/llmstack/hub)"
    )
    parser.add_argument(
        "--per-document",
        action=argparse.BooleanOptionalAction,
        help="score each document by itself (default: c4 and other sets of documents); --no-per-document joins them by "
        "a blank line to one text (default: files). wikitext2 is one text",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="with --per-document: cut BOS and document to N tokens together (default: no cut)",
    )
    parser.add_argument(
        "--max-documents", type=int, metavar="N", help="only the first N documents; of wikitext2, lines (default: all)"
    )
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
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="tokens of a forward pass, padding included, one window at least; it changes results by rounding alone "
        "(default: %(default)s)",
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
    from llmstack.checkpoint.files import write_atomically

    ranks = join()
    shares = together(ranks, lambda: _measure(args, (ranks.rank, ranks.world_size)))
    if not ranks.is_first:
        return 0
    result, settings = shares[0]
    if any(others != settings for _, others in shares):
        raise UserError(f"{args.ckpt} has changed while the ranks read it: name one checkpoint of it")
    result = replace(result, nats=math.fsum(share.nats for share, _ in shares))
    _print(result, settings)
    if args.output is not None:
        record = {
            "nats_per_token": result.nats_per_token,
            "perplexity": result.perplexity,
            "word_perplexity": result.word_perplexity,
            "bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "words": result.words,
            "bytes": result.num_bytes,
            "documents": result.documents,
            **settings,
        }
        write_atomically(args.output, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0


def _measure(args: argparse.Namespace, share: tuple[int, int]) -> tuple[Perplexity, dict[str, Any]]:
    """What this process (number, of how many) has found, and under which settings."""
    import torch

    from llmstack.checkpoint import load_model, resolve
    from llmstack.evaluation.perplexity import score

    data = _data(args)
    _check(args, data)
    source = resolve(args.ckpt)
    tokenizer, policy = _tokenizer(args, source)
    window = args.window if args.window is not None else _default_window(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _as_weights(load_model(source, device=device), args.weights)
    with _Progress(shown=share[0] == 0) as progress:
        result = score(
            model,
            _sequences(args, data, tokenizer, policy),
            window=window,
            stride=args.stride,
            batch_tokens=args.batch_tokens,
            share=share,
            progress=progress,
        )
    if result.tokens == 0:
        raise UserError(f"{args.dataset}: no token to score")
    return result, {
        "unit": data.unit,
        "per_document": data.per_document,
        "max_tokens": args.max_tokens,
        "window": window,
        "stride": args.stride or window,
        "bos": policy.bos,
        "weights": args.weights,
        "dataset": data.name,
        "checkpoint": str(source.path),
        "tokenizer": tokenizer.fingerprint,
    }


def _print(result: Perplexity, settings: dict[str, Any]) -> None:
    documents = f" of {result.documents} documents" if settings["per_document"] else ""
    print(
        f"{settings['dataset']}: {settings['unit']} {'after' if settings['bos'] else 'without'} BOS, "
        f"window {settings['window']}, stride {settings['stride']}, weights {settings['weights']}; "
        f"{result.tokens} tokens{documents}"
    )
    bits, words = result.bits_per_byte, result.word_perplexity
    why = "cut documents" if result.num_bytes is None else "no words between whitespace"
    print(f"token level: {result.nats_per_token:.4f} nats per token, perplexity {result.perplexity:.4f}")
    print(f"word level: perplexity {f'{words:.4f} of {result.words} words' if words else f'unknown ({why})'}")
    print(f"byte level: {f'{bits:.4f}' if bits is not None else f'unknown ({why})'} bits per byte")


@dataclass(frozen=True)
class _Data:
    """What ``--dataset`` means."""

    name: str
    files: str | list[Path]
    per_document: bool
    joined: Callable[[Iterable[str]], str] = _SEPARATOR.join
    """One text of many."""
    whole: str = "one text"
    """What that is."""

    @property
    def unit(self) -> str:
        """What is scored by itself."""
        return "each document" if self.per_document else self.whole


def _data(args: argparse.Namespace) -> _Data:
    """The files, and the convention by which figures of a known set are compared."""
    from llmstack.evaluation.perplexity import wikitext_file

    if args.data_root is not None:
        # Where all of the stack looks for named sets.
        os.environ["LLMSTACK_DATA"] = args.data_root
    name, _, split = args.dataset.partition(":")
    if name not in CORPORA or Path(args.dataset).exists():
        return _Data(args.dataset, args.dataset, bool(args.per_document))
    if name != "wikitext2":
        split = split or "validation"
        return _Data(f"{name}:{split}", find_split(name, split), args.per_document is not False)
    if args.per_document:
        raise UserError("wikitext2 is one text, whose rows are its lines: leave out --per-document")
    split = split or "test"
    return _Data(f"{name}:{split}", find_split(name, split), False, wikitext_file, "the raw file")


def _as_weights(model: Llama, weights: str) -> Llama:
    if weights == "fp32":
        return model
    from llmstack.inference.generate import inference_form

    return inference_form(model.bfloat16(), weights=None if weights == "bf16" else weights)  # type: ignore[arg-type]


def _check(args: argparse.Namespace, data: _Data) -> None:
    if args.max_tokens is not None and not data.per_document:
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


def _sequences(
    args: argparse.Namespace, data: _Data, tokenizer: Tokenizer, policy: BosEosPolicy
) -> Iterator[TokenSequence]:
    from llmstack.data.sources import iterate_documents
    from llmstack.evaluation.perplexity import token_sequences

    documents = islice(iterate_documents(data.files), args.max_documents)
    texts: Iterable[str] = (document.text for document in documents)
    if not data.per_document:
        texts = [data.joined(texts)]
    return token_sequences(texts, tokenizer, policy, args.max_tokens)


class _Progress:
    """The number of windows scored so far, on standard error, once a second where that is a terminal."""

    def __init__(self, shown: bool) -> None:
        self._wanted = shown and sys.stderr.isatty()
        self._shown = time.monotonic()
        self._open = False

    def __enter__(self) -> Callable[[int], None]:
        return self._show

    def __exit__(self, *exception: object) -> None:
        if self._open:
            print(file=sys.stderr)

    def _show(self, windows: int) -> None:
        if self._wanted and time.monotonic() - self._shown > 1:
            print(f"\r{windows} windows scored", end="", file=sys.stderr, flush=True)
            self._shown, self._open = time.monotonic(), True
