"""``llmstack fetch``: what training and evaluation read, brought from the hub to where offline nodes find it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from llmstack.errors import UserError
from llmstack.hub import CORPORA, GROUPS, HubSet, hub_root


def add_parser(subparsers: Any) -> None:
    """Register ``fetch``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    names = "; ".join(f"{group}: {', '.join(sets)}" for group, sets in GROUPS.items())
    parser = subparsers.add_parser(
        "fetch",
        help="bring data, benchmarks and tokenizers from the hub",
        description="Bring data sets, benchmarks and tokenizers from the hub into one folder in the hub's own layout. "
        "Stopped in any way, the same command goes on; each file is checked against the hub's checksum and listed in "
        f"manifest.json. The only command that needs the internet. Known are {names}.",
    )
    parser.add_argument(
        "--what",
        required=True,
        metavar="NAMES",
        help="names separated by commas; `corpora`, `benchmarks` and `tokenizers` stand for all of theirs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the folder (default: $LLMSTACK_DATA, or ~/.cache/llmstack/hub); set LLMSTACK_DATA to it afterwards",
    )
    parser.add_argument("--files", type=int, metavar="N", help="of each split of a corpus only the first N files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch one set after the other; the last line is JSON."""
    from llmstack.data.fetch import fetch

    if args.files is not None and args.files < 1:
        raise UserError(f"--files is {args.files}; it must be at least 1")
    root = args.out or hub_root()
    sizes = {}
    for name, hub_set in _chosen(args.what).items():
        num_files = args.files if name in CORPORA else None
        sizes[name] = fetch(hub_set, root, num_files, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps({"folder": str(root), "bytes": sizes}))
    return 0


def _chosen(what: str) -> dict[str, HubSet]:
    known = {name: hub_set for sets in GROUPS.values() for name, hub_set in sets.items()}
    chosen: dict[str, HubSet] = {}
    for name in what.split(","):
        if name in GROUPS:
            chosen |= GROUPS[name]
        elif name in known:
            chosen[name] = known[name]
        else:
            raise UserError(f"--what {name}: not known (there are: {', '.join([*GROUPS, *known])})")
    return chosen
