"""A whole training run, and a measurement of a checkpoint, with Lightning's Trainer."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import TensorBoardLogger

from llmstack.checkpoint import (
    Mirror,
    RunFolder,
    checkpoint_bytes,
    load_model,
    record_environment,
    require_disk_space,
    resolve,
)
from llmstack.data import bits_per_byte
from llmstack.errors import Stopped, UserError
from llmstack.model import Llama, ModelConfig
from llmstack.ranks import Ranks
from llmstack.signals import StopSignals
from llmstack.tokenizer import load_tokenizer
from llmstack.training.callbacks import (
    Checkpointing,
    Diagnostics,
    Evaluation,
    Metrics,
    NormLife,
    Profiling,
    ProgressDisplay,
    SameWeights,
    SkippedSteps,
    StopOnSignal,
    Together,
    Validation,
)
from llmstack.training.callbacks.evaluating import Evaluate
from llmstack.training.datamodule import LanguageData
from llmstack.training.events import EventLog
from llmstack.training.module import LanguageModel, fit_to_data, open_initial_weights
from llmstack.training.rhythm import RunConfig
from llmstack.training.strategies import Ddp, Zero


def check(trainer: L.Trainer, module: LanguageModel, data: LanguageData, config: RunConfig) -> None:
    """Prepare the data and find whatever can be wrong, before a run folder exists or another rank is started.

    Raises:
        UserError: no number of steps, bad data, a contradicting DeepSpeed configuration, or a model that fits neither
            the data nor its initial weights.
    """
    if trainer.max_steps < 1:
        raise UserError(f"trainer.max_steps is {trainer.max_steps}: give the number of optimiser steps")
    if trainer.world_size > 1 and not isinstance(trainer.strategy, Ddp | Zero):
        raise UserError(
            f"trainer asks for {trainer.world_size} processes, but not how they share the work: add "
            "-c trainer/ddp.yaml, zero1.yaml, zero2.yaml, zero3.yaml or zero3_offload.yaml"
        )
    data.setup("fit")
    module.config = fit_to_data(module.config, data)
    if module.init_from is not None:
        module.initial_weights = open_initial_weights(module.init_from, module.config)
    evaluates = config.evaluate_every is not None
    if evaluates and data.tokenizer is None:
        raise UserError("run.evaluate_every: this data has no tokenizer, and tasks are asked in words")
    if evaluates and isinstance(trainer.strategy, Zero) and trainer.strategy.stage == 3:
        raise UserError(
            "run.evaluate_every: no rank of ZeRO-3 has a whole model; evaluate beside the training, with "
            "llmstack evaluate RUN --watch"
        )
    if isinstance(trainer.strategy, Zero):
        trainer.strategy.decide(trainer, data.micro_batch_size)


def train(
    trainer: L.Trainer,
    module: LanguageModel,
    data: LanguageData,
    run: RunFolder,
    config: RunConfig,
    signals: StopSignals,
    mirror: Mirror | None = None,
    evaluate: Evaluate | None = None,
) -> None:
    """Train in ``run`` from its newest good checkpoint, or from the start, to the end, and validate there.

    Every rank calls it; the first one, which alone has the run locked and the mirror, decides where to go on and
    writes.

    Args:
        evaluate: asks the model in the middle of its training, where ``config`` says so.

    Raises:
        Stopped: a signal asked for it, or too many steps were skipped in a row; the run is saved.
    """
    ranks = Ranks()
    log = EventLog(run.path / "logs" / "events.log", ranks)
    resumed_step = 0
    if trainer.is_global_zero:
        module.resume_from = run.newest_checkpoint()
        resumed_step = module.resume_from.step if module.resume_from else 0
        run.cut_metrics(resumed_step)
        _check_rows(run, resumed_step)
        require_room(module.config, run, config, trainer.max_steps)
        record_environment(run.environment_path)
        # Written anew at each start: the data's own tokenizer is the true one, whatever became of the copy.
        data.save_tokenizer(run.path / "tokenizer")
        if resumed_step:
            log.say(f"resuming {run.path} from step {resumed_step} of {trainer.max_steps}")
        if isinstance(trainer.strategy, Ddp | Zero):
            log.say(_summary(trainer, data))
        for line in (data.describe_loading(trainer), data.describe_mixture(), data.describe_packing()):
            if line is not None:
                log.say(line)
    profiled = config.steps_to_profile()
    profiling = Profiling(run.path, profiled, memory=True) if config.profile_steps else None
    skipped = SkippedSteps(ranks, config, log)
    metrics = Metrics(run.metrics, ranks, profiling)
    stop, together = StopOnSignal(ranks, signals), Together(ranks, config)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # In this order: a skipped step is undone before anyone counts it, what the norms measure is not taken for waiting
    # for data, and a step is saved when all is done at it.
    callbacks += [together, skipped, metrics, NormLife(ranks)]
    callbacks += [Diagnostics(run.diagnostics, ranks, config, metrics), Validation(config)]
    if evaluate is not None:
        callbacks.append(Evaluation(evaluate, ranks, config, metrics, together, log))
    callbacks += [profiling] if profiling is not None else []
    callbacks += [ProgressDisplay(metrics)] if trainer.is_global_zero else []
    callbacks += [stop, SameWeights(ranks, config), Checkpointing(run, config, ranks, metrics, skipped, log, mirror)]
    tensorboard = TensorBoardLogger(run.path, name="tensorboard", version="", purge_step=resumed_step + 1)
    trainer.loggers = [*trainer.loggers, tensorboard]
    # Validation is our own callback's business.
    trainer.check_val_every_n_epoch = sys.maxsize
    with stop.listening(trainer):
        trainer.fit(module, datamodule=data)
    if trainer.is_global_zero and (
        mixture := data.describe_mixture(data.samples_seen(trainer.global_step + skipped.total))
    ):
        log.say(mixture)
    if trainer.global_step < trainer.max_steps:
        raise _early_stop(trainer, run, stop, skipped)
    if trainer.is_global_zero:
        run.finish(trainer.global_step)


def _early_stop(trainer: L.Trainer, run: RunFolder, stop: StopOnSignal, skipped: SkippedSteps) -> Stopped:
    """Why the run has ended before its last step, and where it stands."""
    made = trainer.global_step
    where = f"{run.path} {f'is saved at step {made}' if made else 'has made no step'} of {trainer.max_steps}"
    if skipped.at_limit:
        return Stopped(
            f"{skipped.in_a_row} steps in a row had no finite gradient; {where} (a lower learning rate or more "
            "warm-up may help)",
            status=1,
        )
    return Stopped(f"{where}; the same command continues it", 128 + stop.received if stop.received else 1)


def require_room(model: ModelConfig, run: RunFolder, config: RunConfig, max_steps: int) -> None:
    """Refuse a run whose checkpoints the disk cannot hold.

    Raises:
        UserError: see ``require_disk_space``.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Llama(model).state_dict().items()}
    require_disk_space(run, checkpoint_bytes(shapes), config.checkpoints_on_disk(max_steps))


def _summary(trainer: L.Trainer, data: LanguageData) -> str:
    """One line on how the run is spread: the numbers that Lightning, DeepSpeed and the data all go by."""
    zero = trainer.strategy
    how = f"ZeRO-{zero.stage}{' with offload' if zero.offload else ''}" if isinstance(zero, Zero) else "DDP"
    kind = "CPU rank" if isinstance(trainer.accelerator, CPUAccelerator) else "GPU"
    where = f"{trainer.world_size} {kind}{'s' if trainer.world_size > 1 else ''}"
    exchange = " over gloo (no GPU here)" if kind == "CPU rank" else ""
    return (
        f"{how} on {where}{exchange}, {trainer.precision}: {data.samples_per_step(trainer)} samples a step = "
        f"{data.micro_batch_size} a micro-batch x {trainer.accumulate_grad_batches} accumulated x "
        f"{trainer.world_size} ranks; gradients clipped at {trainer.gradient_clip_val or 'no norm'}"
    )


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
    if data.prepared:
        heldout = [one["heldout"] for one in data.prepared]
        result["bits_per_byte"] = bits_per_byte(heldout, loss, module.validation_tokens)
    return result
