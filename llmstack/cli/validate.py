"""``llmstack validate``: loss and perplexity of a checkpoint over the held-out split of a data configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from llmstack.cli.parsing import Parser, output_file

ON_ONE_DEVICE = ("--trainer.strategy=auto", "--trainer.devices=1", "--trainer.num_nodes=1")

SUMMARY = "validation loss and perplexity of a checkpoint over a data configuration"


def main(arguments: Sequence[str]) -> int:
    """Print the token-weighted result as one JSON line.

    Returns:
        0: measured.
    """
    from llmstack.checkpoint.files import write_atomically
    from llmstack.cli.configured import parse
    from llmstack.errors import UserError
    from llmstack.training.run import validate

    own = Parser(prog="llmstack validate", add_help=False, allow_abbrev=False)
    own.add_argument("--ckpt_path", metavar="CKPT", help="run folder, checkpoint or Hugging Face folder")
    own.add_argument("--baselines", action="store_true", help="also score n-gram models of the same tokens")
    own.add_argument("--output", type=output_file, metavar="F.json", help="write the result there, too")
    options, rest = own.parse_known_args(arguments)
    if {"-h", "--help"} & set(rest):
        print(own.format_help(), "and the options of the configuration:\n", flush=True)
    elif options.ckpt_path is None and not any(argument.startswith("--print_config") for argument in rest):
        raise UserError("--ckpt_path is not set: give a run folder, a checkpoint or a Hugging Face folder")
    # A measurement needs one device, also of a run that was spread over many.
    cli, _ = parse("validate", [*rest, *ON_ONE_DEVICE])
    result = validate(cli.trainer, cli.model, cli.datamodule, options.ckpt_path)
    if options.baselines:
        result["baselines"] = _baselines(cli.datamodule)
    text = json.dumps(result)
    if options.output:
        write_atomically(options.output, text + "\n")
    print(text)
    return 0


def _baselines(data: object) -> dict[str, object]:
    """Unigram and interpolated bigram models of the training split, on the same held-out tokens."""
    from dataclasses import asdict

    from llmstack.data import score_baselines
    from llmstack.errors import UserError
    from llmstack.training.datamodule import LanguageData

    assert isinstance(data, LanguageData)
    if len(data.prepared) != 1:
        raise UserError(f"--baselines needs one set of text; data.source is {data.source}")
    print("scoring unigram and bigram models of the same tokens ...", file=sys.stderr)
    return asdict(score_baselines(data.prepared[0]))
