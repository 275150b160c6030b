"""``llmstack bench data``: what reading and tokenising cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llmstack.cli.parsing import output_file
from llmstack.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Register ``data``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "data",
        help="the loader alone, seeking, tokenising beside the library",
        description="Of prepared data: time to open and to read any sample, tokens/s of the loader alone with each "
        "number of workers, the training process's own time for it and memory per process. Of text: MB/s of "
        "tokenising beside the tokenizer library's own batch call. The last line of output is JSON.",
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="prepared data")
    parser.add_argument("--block-size", type=int, default=1024, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=8, metavar="N", help="samples (default: %(default)s)")
    parser.add_argument("--workers", default="0,2", metavar="A,B", help="reading processes (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="X", help="for each number of workers (default: %(default)s)"
    )
    parser.add_argument("--files", nargs="+", metavar="F", help="text to tokenise")
    parser.add_argument("--tokenizer", metavar="T", help="with which one")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="of tokenising, of which the median (default: %(default)s)"
    )
    parser.add_argument("--output", type=output_file, metavar="F.json", help="also write the JSON to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print figures and JSON; raises UserError for whatever is wrong with the arguments."""
    from llmstack.bench.data import as_text, measure_reading, measure_tokenising
    from llmstack.checkpoint.files import write_atomically
    from llmstack.tokenizer import load_tokenizer

    if args.folder is None and args.files is None:
        raise UserError("give --folder, to measure reading, or --files and --tokenizer, to measure tokenising, or all")
    if (args.files is None) != (args.tokenizer is None):
        raise UserError("--files and --tokenizer go together")
    for name in ("block_size", "micro_batch_size", "seconds", "repeats"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    try:
        workers = [int(number) for number in args.workers.split(",")]
    except ValueError:
        workers = [-1]
    if min(workers) < 0:
        raise UserError(f"--workers is {args.workers}; give numbers separated by commas")
    measured: dict[str, Any] = {"bench": "data"}
    if args.folder is not None:
        measured |= measure_reading(args.folder, args.block_size, args.micro_batch_size, workers, args.seconds)
    if args.files is not None:
        measured["tokenising"] = measure_tokenising(args.files, load_tokenizer(args.tokenizer), args.repeats)
    print(as_text(measured))
    text = json.dumps(measured)
    print(text)
    if args.output is not None:
        write_atomically(args.output, text + "\n")
    return 0
