"""A whole training run, and a measurement of a checkpoint, with Lightning's Trainer."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from llmstack.checkpoint import RunFolder, load_model, record_environment, resolve
from llmstack.errors import Stopped, UserError
from llmstack.tokenizer import load_tokenizer
from llmstack.training.callbacks import Checkpointing, Metrics, NormLife, ProgressDisplay, StopOnSignal
from llmstack.training.datamodule import LanguageData
from llmstack.training.module import LanguageModel, fit_to_data, open_initial_weights
from llmstack.training.rhythm import RunConfig


def check(trainer: L.Trainer, module: LanguageModel, data: LanguageData) -> None:
    """Prepare the data and find whatever can be wrong, before a run folder exists.

    Raises:
        UserError: no number of steps, bad data, or a model that fits neither the data nor its initial weights.
    """
    if trainer.max_steps < 1:
        raise UserError(f"trainer.max_steps is {trainer.max_steps}: give the number of optimiser steps")
    if trainer.world_size > 1:
        raise UserError(
            f"trainer asks for {trainer.world_size} processes, but a run has one device: set --trainer.devices 1"
        )
    data.setup("fit")
    module.config = fit_to_data(module.config, data)
    if module.init_from is not None:
        module.initial_weights = open_initial_weights(module.init_from, module.config)


def train(trainer: L.Trainer, module: LanguageModel, data: LanguageData, run: RunFolder, config: RunConfig) -> None:
    """Train in ``run`` from its newest good checkpoint, or from the start, to the end, and validate there.

    Raises:
        Stopped: a signal asked for it; the run is saved.
    """
    module.resume_from = run.newest_checkpoint()
    resumed_step = module.resume_from.step if module.resume_from else 0
    if resumed_step:
        print(f"resuming {run.path} from step {resumed_step} of {trainer.max_steps}", file=sys.stderr)
    run.cut_metrics(resumed_step)
    _check_rows(run, resumed_step)
    record_environment(run.environment_path)
    # Written anew at each start: the data's own tokenizer is the true one, whatever became of the copy.
    data.save_tokenizer(run.path / "tokenizer")
    metrics = Metrics(run.metrics)
    checkpointing = Checkpointing(run, config, metrics)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    stop = StopOnSignal()
    callbacks.extend([NormLife(), metrics, ProgressDisplay(metrics), stop, checkpointing])
    tensorboard = TensorBoardLogger(run.path, name="tensorboard", version="", purge_step=resumed_step + 1)
    trainer.loggers = [*trainer.loggers, tensorboard]
    # Lightning counts micro-batches; without validation during training it must still know an interval.
    interval = config.validate_every or trainer.max_steps + 1
    trainer.val_check_interval = interval * trainer.accumulate_grad_batches
    trainer.fit(module, datamodule=data)
    if trainer.global_step < trainer.max_steps:
        where = f"{run.path} is saved at step {trainer.global_step} of {trainer.max_steps}"
        raise Stopped(f"{where}; the same command continues it", 128 + stop.received if stop.received else 1)
    if not config.validation_due(trainer.global_step) or resumed_step == trainer.max_steps:
        trainer.validate(module, datamodule=data, verbose=False)
    run.finish(trainer.global_step)


def _check_rows(run: RunFolder, step: int) -> None:
    """metrics.csv holds each step up to the checkpoint once, or the run would go on from a record with holes.

    Raises:
        UserError: a row is missing or stands twice.
    """
    steps = [row["step"] for row in run.metrics.read()]
    if steps != list(range(1, step + 1)):
        odd = next((n for n, found in enumerate(steps, 1) if found != n), len(steps) + 1)
        raise UserError(
            f"{run.path / 'metrics.csv'}: row {odd} is not that of step {odd}, but the checkpoint is of step {step}; "
            "put the file back, or train in another --run.dir"
        )


def validate(trainer: L.Trainer, module: LanguageModel, data: LanguageData, ckpt: str) -> dict[str, Any]:
    """Measure a checkpoint on the held-out split of ``data``.

    Returns:
        ``loss`` (nats per token), ``perplexity``, ``tokens`` and, for text, ``bits_per_byte``.

    Raises:
        UserError: the checkpoint was trained with another tokenizer, or its positions do not reach.
    """
    source = resolve(ckpt)
    data.setup("validate")
    if source.tokenizer is not None and data.tokenizer is not None:
        trained_with = load_tokenizer(source.tokenizer)
        if trained_with.fingerprint != data.tokenizer.fingerprint:
            raise UserError(f"{ckpt} was trained with another tokenizer than that of the data: use its own")
    module.config = fit_to_data(source.config, data)
    module.adopt(load_model(source))
    trainer.validate(module, datamodule=data, verbose=False)
    loss = float(trainer.callback_metrics["val_loss"])
    result = {
        "loss": loss,
        "perplexity": float(trainer.callback_metrics["val_perplexity"]),
        "tokens": module.validation_tokens,
    }
    if data.prepared is not None:
        result["bits_per_byte"] = data.prepared.bits_per_byte(loss)
    return result
