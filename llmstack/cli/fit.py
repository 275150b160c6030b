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
    from llmstack.cli.configured import HOW_IT_RUNS, configuration, parse
    from llmstack.training.run import check, train
    from llmstack.training.strategies import ending_together

    cli, names = parse("fit", arguments)
    trainer, config = cli.trainer, cli.config_init["run"]
    check(trainer, cli.model, cli.datamodule)
    path = config.dir or f"runs/{'-'.join(names) or 'default'}"
    # One process owns the run folder; the other ranks of the run look on.
    run = RunFolder.open(path, configuration(cli), HOW_IT_RUNS) if trainer.is_global_zero else RunFolder(path)
    try:
        if run.status == "finished":
            text = f"{run.path} is finished: nothing to do (another --run.dir starts another run)"
        else:
            with failing_in_one_line(run.path), ending_together(trainer):
                train(trainer, cli.model, cli.datamodule, run, config)
            text = f"finished: {run.path}"
        if trainer.is_global_zero:
            print(text, file=sys.stderr)
    finally:
        run.close()
    return 0
