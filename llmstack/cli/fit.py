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
    from llmstack.checkpoint import Mirror, RunFolder
    from llmstack.checkpoint.files import failing_in_one_line
    from llmstack.cli.configured import HOW_IT_RUNS, configuration, parse
    from llmstack.training.run import check, train
    from llmstack.training.strategies import ending_together

    cli, names = parse("fit", arguments)
    trainer, config = cli.trainer, cli.config_init["run"]
    check(trainer, cli.model, cli.datamodule)
    path = config.dir or f"runs/{'-'.join(names) or 'default'}"
    mirror = Mirror(config.mirror) if config.mirror is not None else None
    if mirror is not None:
        mirror.refuse_other_run(str(RunFolder(path).path), configuration(cli), HOW_IT_RUNS)
        if mirror.is_finished:
            print(f"{mirror.url} has the finished run: nothing to do", file=sys.stderr)
            return 0
    # One process owns the run folder; the other ranks of the run look on.
    run = RunFolder.open(path, configuration(cli), HOW_IT_RUNS) if trainer.is_global_zero else RunFolder(path)
    try:
        if mirror is not None and trainer.is_global_zero:
            if came := mirror.restore(run):
                print(f"{run.path}: brought {len(came)} checkpoints from {mirror.url}", file=sys.stderr)
            # At once, so that a store which takes nothing is known before any training.
            mirror.send(run)
        if run.status == "finished":
            text = f"{run.path} is finished: nothing to do (another --run.dir starts another run)"
        else:
            with failing_in_one_line(run.path), ending_together(trainer):
                train(trainer, cli.model, cli.datamodule, run, config, mirror)
            text = f"finished: {run.path}"
        if mirror is not None and trainer.is_global_zero:
            mirror.send(run)
        if trainer.is_global_zero:
            print(text, file=sys.stderr)
    finally:
        run.close()
    return 0
