"""``llmstack fit``: train a model from composed configurations, resuming where an earlier start stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack.errors import Stopped
from llmstack.signals import StopSignals

if TYPE_CHECKING:
    from llmstack.training.callbacks.evaluating import Evaluate
    from llmstack.training.datamodule import LanguageData
    from llmstack.training.rhythm import RunConfig

SUMMARY = "train a model from configurations, or continue its run"


def main(arguments: Sequence[str]) -> int:
    """Train until ``trainer.max_steps``; a finished run says so.

    Returns:
        0: trained to the end, now or earlier.
    """
    signals = StopSignals()
    with signals.from_start():
        return _fit(arguments, signals)


def _fit(arguments: Sequence[str], signals: StopSignals) -> int:
    from llmstack.checkpoint import Mirror, RunFolder
    from llmstack.checkpoint.files import failing_in_one_line
    from llmstack.cli.configured import HOW_IT_RUNS, configuration, parse
    from llmstack.cluster import note_start
    from llmstack.training.run import check, train
    from llmstack.training.strategies import ending_together

    cli, names = parse("fit", arguments)
    trainer, config = cli.trainer, cli.config_init["run"]
    check(trainer, cli.model, cli.datamodule, config)
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
            if trainer.is_global_zero:
                note_start(run.path)
            with failing_in_one_line(run.path), ending_together(trainer):
                evaluate = _evaluation(cli.datamodule, run.path, config)
                train(trainer, cli.model, cli.datamodule, run, config, signals, mirror, evaluate)
            text = f"finished: {run.path}"
        if mirror is not None and trainer.is_global_zero:
            mirror.send(run)
        if trainer.is_global_zero:
            print(text, file=sys.stderr)
    except Stopped as stop:
        run.close()
        raise _coming_back(stop, run.path, signals) if trainer.is_global_zero else stop from None
    finally:
        run.close()
    return 0


def _evaluation(data: LanguageData, run: Path, config: RunConfig) -> Evaluate | None:
    """What asks the model while it trains, where that is wanted."""
    if config.evaluate_every is None:
        return None
    from llmstack.evaluation.during_training import TaskEvaluation
    from llmstack.evaluation.settings import Settings, task_names

    assert data.tokenizer is not None
    assert data.policy is not None
    settings = Settings(task_names(config.evaluate_tasks), config.evaluate_num_fewshot, config.evaluate_limit)
    return TaskEvaluation(data.tokenizer, data.policy, run, settings, config.evaluate_data_root)


def _coming_back(stop: Stopped, path: Path, signals: StopSignals) -> Stopped:
    """Where a scheduler has stopped the run, not its user, its job is queued again; the result says so."""
    from llmstack.cluster import Job, requeue

    by_scheduler = {128 + signals.announcing: signals.announcing.name, 128 + signal.SIGTERM: "SIGTERM"}
    if stop.status not in by_scheduler or Job.present() is None:
        return stop
    return Stopped(f"{stop}; {requeue(path, f'stopped by {by_scheduler[stop.status]}')}", stop.status)
