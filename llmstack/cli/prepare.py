"""``llmstack prepare``: text to tokens on disk, in parallel, taken up again where it was stopped."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llmstack.errors import UserError
from llmstack.hub import CORPORA, find_source, find_tokenizer


def add_parser(subparsers: Any) -> None:
    """Register ``prepare``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "prepare",
        help="tokenise text to disk",
        description="Tokenise text to a folder that `fit` trains from with -c data/prepared.yaml --data.folder DIR. "
        "Stopped in any way, the same command goes on where it was; the result does not depend on that, nor on the "
        "number of processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--source",
        nargs="+",
        action="extend",
        required=True,
        metavar="F",
        help="files, globs or folders: .txt, .jsonl, .json (a row a line), also .gz or .zst, .parquet, .arrow (what "
        f"datasets saves to disk); or the name of a set that `llmstack fetch` has brought: {', '.join(CORPORA)}, or "
        "one with a split, as c4:validation",
    )
    parser.add_argument("--tokenizer", required=True, metavar="T", help="file or folder, or a fetched tokenizer's name")
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder to make, or an address (s3://bucket/name) to which it is sent when it is made in the cache",
    )
    parser.add_argument(
        "--heldout",
        nargs="+",
        metavar="F",
        default=argparse.SUPPRESS,
        help="files that are never trained on; without, a part of the source that its texts decide: 0.5 %% of the "
        "rows (50 to 10,000), or 10 %% of a plain text in sections of 2 kB",
    )
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of the rows that holds the text")
    parser.add_argument("--num-proc", type=int, default=1, metavar="N", help="processes")
    parser.add_argument(
        "--max-bad-share",
        type=float,
        default=0.01,
        metavar="X",
        help="share of rows without a readable text up to which they are skipped and listed in DIR/skipped.jsonl",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare, then print what there is as one line of JSON."""
    from llmstack.data import prepare_source
    from llmstack.data.prepared import INDEX
    from llmstack.data.remote import is_remote, send
    from llmstack.tokenizer import BosEosPolicy, load_tokenizer

    if args.num_proc < 1:
        raise UserError(f"--num-proc is {args.num_proc}; it must be at least 1")
    if not 0 <= args.max_bad_share <= 1:
        raise UserError(f"--max-bad-share is {args.max_bad_share}; it must be a share between 0 and 1")
    out = None if is_remote(args.out) else Path(args.out)
    if out is not None and out.exists() and not (out / INDEX).is_file():
        raise UserError(f"{out}: exists and holds no prepared data; give a new folder")
    source = find_source(args.source)
    heldout = find_source(args.heldout) if "heldout" in args else None
    tokenizer = load_tokenizer(find_tokenizer(args.tokenizer))
    prepared = prepare_source(
        source,
        tokenizer,
        BosEosPolicy.default(tokenizer),
        args.text_field,
        heldout,
        out,
        args.num_proc,
        args.max_bad_share,
    )
    if out is None:
        send(prepared.folder, args.out)
    splits = {
        split: {kind: record[kind] for kind in ("documents", "tokens", "bytes")}
        for split, record in prepared.index["splits"].items()
    }
    print(json.dumps({"folder": args.out, "skipped_rows": prepared.index["skipped_rows"], **splits}))
    return 0
