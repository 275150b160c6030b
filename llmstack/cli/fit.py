"""``llmstack fit``: train a model from composed configurations, resuming where an earlier start stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence

SUMMARY = "train a model from configurations, or continue its run"


def main(arguments: Sequence[str]) -> int:
    """Train until ``trainer.max_steps``; a finished run says so.

    Returns:
        0: trained to the end, now or earlier.
    """
    from llmstack.checkpoint import RunFolder
    from llmstack.checkpoint.files import failing_in_one_line
    from llmstack.cli.configured import configuration, parse
    from llmstack.training.run import check, train

    cli, names = parse("fit", arguments)
    config = cli.config_init["run"]
    check(cli.trainer, cli.model, cli.datamodule)
    run = RunFolder.open(config.dir or f"runs/{'-'.join(names) or 'default'}", configuration(cli))
    try:
        if run.status == "finished":
            print(f"{run.path} is finished: nothing to do (another --run.dir starts another run)", file=sys.stderr)
        else:
            with failing_in_one_line(run.path):
                train(cli.trainer, cli.model, cli.datamodule, run, config)
            print(f"finished: {run.path}", file=sys.stderr)
    finally:
        run.close()
    return 0
