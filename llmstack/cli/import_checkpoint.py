"""``llmstack import``: any checkpoint as one of ours, in a single fp32 file."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register ``import``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "import",
        help="turn any checkpoint into one of ours, in a single fp32 file",
        description="Write a run (its newest good checkpoint), a checkpoint of any number of files, a Hugging Face "
        "Llama or GPT-2 folder or, if trusted, a Lightning .ckpt or a DeepSpeed folder as one checkpoint: the weights "
        "in one fp32 file and the tokenizer, without optimiser state. No GPU is needed and the weights are in memory "
        "once.",
    )
    parser.add_argument("path", metavar="PATH", help="what to import")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the new checkpoint; absent or empty")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle a Lightning or DeepSpeed checkpoint, which runs whatever code is in it (default: refuse)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; raises UserError where there is nothing to import or ``--out`` is taken."""
    from llmstack.checkpoint import import_checkpoint

    made = import_checkpoint(args.path, args.out, args.trust, report=lambda line: print(line, file=sys.stderr))
    size = sum(file.size for file in made.files)
    tokenizer = "with its tokenizer" if made.tokenizer_path is not None else "without a tokenizer (there was none)"
    print(f"{made.path}: step {made.step}, {size / 1e6:,.1f} MB, {tokenizer}")
    return 0
