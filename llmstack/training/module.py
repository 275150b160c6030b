"""The language model as a LightningModule: what is trained, with what optimiser, measured how."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from llmstack.checkpoint import Checkpoint, resolve
from llmstack.checkpoint.tensors import TensorFiles, require_tensors
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.training.optim import OptimizerConfig, build_optimizer, clip_gradients
from llmstack.training.step import micro_batch_loss, random_seed, token_losses

if TYPE_CHECKING:
    from llmstack.training.datamodule import LanguageData

VOCABULARY_MULTIPLE = 64
"""A vocabulary taken from a tokenizer is padded to this, which matrix libraries like."""


class LanguageModel(L.LightningModule):
    """A decoder with its training step.

    Args:
        config: architecture.
        optimizer: optimiser and learning-rate schedule.
        init_from: take the initial weights from this run folder, checkpoint or Hugging Face folder.
        compile: compile the blocks and the loss.
        seed: seed of the initial weights and of dropout.
    """

    def __init__(
        self,
        config: ModelConfig = ModelConfig(),  # noqa: B008 - frozen
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
        init_from: str | None = None,
        compile: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.optimizer_config = config, optimizer
        self.init_from, self.compile_blocks, self.seed = init_from, compile, seed
        self.initial_weights: TensorFiles | None = None
        self.resume_from: Checkpoint | None = None
        self.model: Llama | None = None
        self.gradient_norm = torch.zeros(())
        self.step_losses: list[Tensor] = []
        self.validation_loss = MeanMetric().set_dtype(torch.float64)
        self.validation_tokens = 0

    @property
    def decoder(self) -> Llama:
        """The model, once ``configure_model`` has built it."""
        assert self.model is not None, "the model is built by configure_model"
        return self.model

    def configure_model(self) -> None:
        """Build the model for the data at hand, with its initial or resumed weights."""
        if self.model is not None:
            return
        self.config = fit_to_data(self.config, self.trainer.datamodule)  # type: ignore[attr-defined]
        torch.manual_seed(random_seed(self.seed, 0, 0, 0))
        self.model = Llama(self.config)
        weights = self.resume_from.weights() if self.resume_from is not None else self.initial_weights
        if weights is not None:
            _copy_weights(weights, self.model)
        if self.compile_blocks:
            compile_model(self.model)

    def adopt(self, model: Llama) -> None:
        """Take a model as it is, to measure it."""
        self.model = compile_model(model) if self.compile_blocks else model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; its learning rate is set before every step from the schedule."""
        return build_optimizer(self.decoder, self.optimizer_config)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """The learning rate of the coming optimiser step."""
        rate = self.optimizer_config.learning_rate(self.global_step + 1, self.trainer.max_steps)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Loss of a micro-batch. Its normaliser covers the whole step, so Lightning's own division is undone."""
        torch.manual_seed(random_seed(self.seed, batch["step"] + 1, batch["micro_batch"], self.global_rank))
        loss = micro_batch_loss(self.decoder, batch)
        self.step_losses.append(loss.detach())
        return loss * self.trainer.accumulate_grad_batches

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by norm, and keep the norm before clipping for the log."""
        self.gradient_norm = clip_gradients(self.decoder, gradient_clip_val)

    def take_step_loss(self) -> Tensor:
        """Mean loss of the optimiser step just made, fp32 scalar; starts the next one."""
        losses, self.step_losses = self.step_losses, []
        return torch.stack(losses).sum()

    def on_validation_epoch_start(self) -> None:
        """Start counting."""
        self.validation_loss.reset()
        self.validation_tokens = 0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the token-weighted mean loss."""
        valid = int((batch["labels"] != -100).sum())
        if valid:
            total = token_losses(self.decoder, batch).sum(dtype=torch.float64)
            self.validation_loss.update(total / valid, weight=valid)
            self.validation_tokens += valid

    def on_validation_epoch_end(self) -> None:
        """Make the result known to callbacks."""
        loss = self.validation_loss.compute()
        self.log_dict({"val_loss": loss, "val_perplexity": loss.exp()}, logger=False)


def fit_to_data(config: ModelConfig, data: LanguageData) -> ModelConfig:
    """The architecture with what only the data can tell: vocabulary size and training length.

    Raises:
        UserError: the vocabulary is smaller than the ids, or the blocks are longer than the positions.
    """
    needed = data.vocab_size
    if config.vocab_size is None:
        config = replace(config, vocab_size=-(-needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
    assert config.vocab_size is not None
    if config.vocab_size < needed:
        raise UserError(
            f"model.config.vocab_size is {config.vocab_size}, but the data has ids up to {needed - 1}; "
            f"set it to at least {needed}, or to null (the tokenizer's)"
        )
    if data.block_size > config.max_position_embeddings:
        raise UserError(
            f"data.block_size {data.block_size} is longer than model.config.max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    if config.norm_method.uses_train_length and config.norm.get("train_length") is None:
        config = replace(config, norm={**config.norm, "train_length": data.block_size})
    return config


def open_initial_weights(ckpt: str, config: ModelConfig) -> TensorFiles:
    """The weights of ``ckpt`` for a model of ``config``, unread.

    Raises:
        UserError: no such checkpoint, or a tensor is missing, left over or of another shape.
    """
    source = resolve(ckpt)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Llama(config).state_dict().items()}
    require_tensors(expected, source.weights.shapes(), source.path)
    return source.weights


@torch.no_grad()
def _copy_weights(weights: TensorFiles, model: Llama) -> None:
    """One tensor at a time, so that the weights are not held twice."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])
