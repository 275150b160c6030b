"""``llmstack``: one console command, a thin file per subcommand, nothing heavy loaded before it is used."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from llmstack import __version__
from llmstack.cli import (
    bench,
    evaluate,
    fetch,
    fit,
    generate,
    import_checkpoint,
    inspect,
    perplexity,
    plan,
    preflight,
    prepare,
    report,
    requeue,
    status,
    submit,
    tokenizer,
    validate,
)
from llmstack.cli.parsing import Parser
from llmstack.errors import Stopped, UserError

CONFIGURED = {"fit": fit, "validate": validate, "plan": plan, "submit": submit}
"""Subcommands whose options are those of the composed configuration, read by a parser of their own."""

SUBCOMMANDS = (
    *(tokenizer, fetch, prepare, evaluate, perplexity, generate, inspect, import_checkpoint, bench, report),
    *(status, preflight, requeue),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(prog="llmstack", description="Train, measure and run Llama-style language models.")
    parser.add_argument("--version", action="version", version=f"llmstack {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, module in CONFIGURED.items():
        subparsers.add_parser(name, help=module.SUMMARY, add_help=False)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        0 on success, 2 on a wrong argument or input, 128 + its number after a signal. Any other failure is an
        exception: a traceback and status 1.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in CONFIGURED:
            return CONFIGURED[arguments[0]].main(arguments[1:])
        parsed = build_parser().parse_args(arguments)
        return parsed.run(parsed)
    except UserError as error:
        print(f"llmstack: {_who()}{error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        # All ranks stop for the same reason; the first one says it.
        if not _who():
            print(f"llmstack: {stop}", file=sys.stderr)
        return stop.status
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, and nothing more to say to it.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"llmstack: {str(error.filename)[:60]}…: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("llmstack: interrupted", file=sys.stderr)
        return 130


def _who() -> str:
    """Which rank of a run speaks, unless it is the first."""
    rank = os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or "0"
    return f"rank {rank}: " if rank != "0" else ""


if __name__ == "__main__":
    sys.exit(main())
