"""The language model as a LightningModule: what is trained, with what optimiser, measured how."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from llmstack.checkpoint import Checkpoint, resolve
from llmstack.checkpoint.tensors import TensorFiles, require_tensors
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.model.norms.method import Gather, whole
from llmstack.model.recompute import recompute_of_layer
from llmstack.training.extension_builds import building_extensions
from llmstack.training.optim import OptimizerConfig, build_optimizer, clip_gradients
from llmstack.training.step import micro_batch_loss, random_seed, token_losses
from llmstack.training.strategies import Zero

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
        activation_checkpointing: what the backward pass computes again instead of keeping it: none; full (blocks keep
            their input alone); a number k: full for every k-th block; selective: all but matrix products and attention.
        compile: compile the blocks and the loss.
        seed: seed of the initial weights and of dropout.
    """

    def __init__(
        self,
        config: ModelConfig = ModelConfig(),  # noqa: B008 - frozen
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
        init_from: str | None = None,
        activation_checkpointing: Literal["none", "full", "selective"] | int = "none",
        compile: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if activation_checkpointing is True or (
            isinstance(activation_checkpointing, int) and activation_checkpointing < 1
        ):
            raise UserError(
                f"model.activation_checkpointing is {activation_checkpointing}; it must be none, full, selective, or "
                "a number from 1"
            )
        self.config, self.optimizer_config = config, optimizer
        self.init_from, self.compile_blocks, self.seed = init_from, compile, seed
        self.activation_checkpointing = activation_checkpointing
        self.initial_weights: TensorFiles | None = None
        self.resume_from: Checkpoint | None = None
        self.model: Llama | None = None
        self.gradient_norm = math.nan
        self.step_losses: list[Tensor] = []
        self.validation_loss = MeanMetric().set_dtype(torch.float64)
        self.validation_tokens = 0

    @property
    def decoder(self) -> Llama:
        """The model, once ``configure_model`` has built it."""
        assert self.model is not None, "the model is built by configure_model"
        return self.model

    @property
    def zero(self) -> Zero | None:
        """The strategy, where it is one of DeepSpeed's."""
        strategy = self.trainer.strategy
        return strategy if isinstance(strategy, Zero) else None

    @property
    def gather(self) -> Gather:
        """Makes parameters whole for reading, on all ranks together."""
        if self.zero is None or self.zero.stage < 3:
            return whole
        from llmstack.training.sharding import gather

        return gather

    @property
    def starting_weights(self) -> TensorFiles | None:
        """Those of the checkpoint to resume, or of ``init_from``; none: drawn."""
        return self.resume_from.weights() if self.resume_from is not None else self.initial_weights

    def configure_model(self) -> None:
        """Build the model for the data at hand, with its initial or resumed weights.

        The order of what is put around a block is fixed here: recomputation, then compilation, and sharding (by the
        strategy, later) around both.
        """
        if self.model is not None:
            return
        self.config = fit_to_data(self.config, self.trainer.datamodule)  # type: ignore[attr-defined]
        # Drawn on the host, whatever computes, and in one order: the same weights under every strategy.
        with torch.device("cpu"):
            self.model = self._build()
        for layer, block in enumerate(self.model.blocks):
            block.recompute = recompute_of_layer(self.activation_checkpointing, layer)
        if self.compile_blocks:
            compile_model(self.model)

    def _build(self) -> Llama:
        weights = self.starting_weights
        torch.manual_seed(random_seed(self.seed, 0, 0, 0))
        if self.zero is None or self.zero.stage < 3:
            with torch.device("meta"):
                model = Llama(self.config)
            model.to_empty(device="cpu").initialise()
            if weights is not None:
                _copy_weights(weights, model.state_dict())
                self.config.norm_method.settle(model)
            return model
        from llmstack.training.sharding import build_sharded

        def fill(model: Llama, name: str, module: nn.Module) -> None:
            model.initialise_module(name, module)
            if weights is not None:
                own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
                _copy_weights(weights, {f"{name}.{key}": tensor for key, tensor in own})

        dtype = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else torch.float32
        model = build_sharded(self.config, fill, dtype, self.zero.settings)
        if weights is None:
            self.config.norm_method.initialise(model, self.gather)
        else:
            self.config.norm_method.settle(model)
        return model

    def adopt(self, model: Llama) -> None:
        """Take a model as it is, to measure it."""
        self.model = compile_model(model) if self.compile_blocks else model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; its learning rate is set before every step from the schedule."""
        if self.zero is not None and self.zero.offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            with building_extensions():
                return build_optimizer(self.decoder, self.optimizer_config, partial(DeepSpeedCPUAdam, adamw_mode=True))
        return build_optimizer(self.decoder, self.optimizer_config)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """The learning rate of the coming optimiser step."""
        rate = self.optimizer_config.learning_rate(self.global_step + 1, self.trainer.max_steps)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Loss of a micro-batch, whose normaliser covers the whole step, all ranks and micro-batches.

        So the division by the accumulation that Lightning makes, and that by the ranks when gradients are averaged,
        are undone here. The norm method's own loss is a mean over a micro-batch, all of one size: there they are right.
        """
        torch.manual_seed(random_seed(self.seed, batch["step"] + 1, batch["micro_batch"], self.global_rank))
        loss, own = micro_batch_loss(self.decoder, batch)
        self.step_losses.append(loss.detach())
        loss = loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)
        return loss if own is None else loss + own

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by norm, and keep the norm before clipping. A norm that is not finite makes the step change nothing.

        The gradients are those of all ranks already, so all of them decide alike. DeepSpeed does the same by itself.
        """
        if self.zero is None:
            self.gradient_norm = float(clip_gradients(self.decoder, gradient_clip_val))
            if not self.step_is_sound:
                optimizer.zero_grad(set_to_none=True)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Lightning's, and DeepSpeed's gradient norm read where DeepSpeed clips."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.zero is not None:
            engine = self.zero.deepspeed_engine
            self.gradient_norm = math.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm() or 0.0)

    @property
    def step_is_sound(self) -> bool:
        """Whether the gradient of the last step was finite on every rank; if not, the step was not made.

        A loss that is not finite makes its gradient so, too: the head finds both together.
        """
        return math.isfinite(self.gradient_norm)

    def take_step_loss(self) -> float:
        """This rank's part of the mean loss of the optimiser step just made; starts the next one."""
        losses, self.step_losses = self.step_losses, []
        return float(torch.stack(losses).sum())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning's own checkpoints, which ``llmstack import --trust`` reads, tell the architecture, too."""
        checkpoint["llmstack_config"] = self.config.to_dict()

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
        counted = torch.tensor(self.validation_tokens, device=self.device)
        self.validation_tokens = int(self.trainer.strategy.reduce(counted, reduce_op="sum"))
        # The same on all ranks already; Lightning wants to hear it.
        self.log_dict({"val_loss": loss, "val_perplexity": loss.exp()}, logger=False, sync_dist=True)


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

    A norm method may take over a model of another: what it has besides starts as it always does.

    Raises:
        UserError: no such checkpoint, a norm that this one cannot go on from, or a tensor is missing, left over or of
            another shape.
    """
    source = resolve(ckpt)
    wanted, there = config.norm_method, source.config.norm_method
    if there.name not in {wanted.name, *wanted.takes_over}:
        known = " or ".join(sorted({wanted.name, *wanted.takes_over}))
        raise UserError(f"model.init_from {ckpt} has the norm {there.name}; {wanted.name} starts from {known}")
    _require_same_function(config, source.config, ckpt)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Llama(config).state_dict().items()}
        known_there = Llama(source.config).state_dict()
    if wanted.name != there.name:
        expected = {name: shape for name, shape in expected.items() if name in known_there or not _of_norm(name)}
    require_tensors(expected, source.weights.shapes(), source.path)
    return source.weights


SAME_FUNCTION = (
    *("num_heads", "kv_heads", "head_size", "positions", "mlp", "rms_norm_eps", "residual", "score_scaling"),
    *("rope_theta", "rope_scaling"),
)
"""What weights depend on without a tensor that tells of it."""


def _require_same_function(config: ModelConfig, there: ModelConfig, ckpt: str) -> None:
    """The same weights have to mean the same.

    Raises:
        UserError: an option differs that no tensor would tell of.
    """
    for name in SAME_FUNCTION:
        ours, theirs = getattr(config, name), getattr(there, name)
        if ours != theirs and (config.positions == "rope" or not name.startswith("rope_")):
            raise UserError(
                f"model.init_from {ckpt} was trained with {name} {theirs}, and model.config has {ours}: the weights "
                "would mean something else"
            )


def _of_norm(name: str) -> bool:
    """Whether a tensor of the decoder belongs to a norm or to what a norm method adds."""
    return "norm." in name or name.startswith("scale_anchor.")


@torch.no_grad()
def _copy_weights(weights: TensorFiles, tensors: Mapping[str, Tensor]) -> None:
    """Fill those of ``tensors`` that are stored, one at a time, so that the weights are not held twice."""
    for name, tensor in tensors.items():
        # A tied head that is sharded already, under its own name, is empty; and stored as the embedding.
        if name in weights and tensor.numel():
            tensor.copy_(weights[name])
