"""Optimiser, its parameter groups and the learning rate as a function of the step. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model import Llama


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its schedule."""

    lr: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only (not on norm gains, scalars and biases), unless the norm says more."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the minimum; warm-up, stable, decay (linear to the minimum); or constant."""
    warmup_ratio: float = 0.05
    """Share of all steps in which the rate rises linearly from 0."""
    decay_ratio: float = 0.2
    """Share of all steps in which wsd decays, at the end."""
    min_lr_ratio: float = 0.1
    """Final rate as a share of the peak."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"optimizer: {name} is {getattr(self, name)}; it must be above 0, and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer: {name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("warmup_ratio", "decay_ratio", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"optimizer: {name} is {getattr(self, name)}; it must be between 0 and 1")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"optimizer: weight_decay is {self.weight_decay}; it must be 0 or above")
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise UserError(f"optimizer: schedule is '{self.schedule}'; it must be cosine, wsd or constant")

    def learning_rate(self, step: int, max_steps: int) -> float:
        """Rate of optimiser step ``step`` (from 1) of ``max_steps``: a pure function, so nothing has to be saved."""
        warmup = round(self.warmup_ratio * max_steps)
        if step <= warmup:
            return self.lr * step / warmup
        floor = self.min_lr_ratio
        if self.schedule == "cosine":
            progress = min((step - warmup) / max(max_steps - warmup, 1), 1.0)
            return self.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        if self.schedule == "wsd":
            decay = max(round(self.decay_ratio * max_steps), 1)
            progress = min(max((step - (max_steps - decay)) / decay, 0.0), 1.0)
            return self.lr * (1 - (1 - floor) * progress)
        return self.lr


FUSED = partial(torch.optim.AdamW, fused=True)


def build_optimizer(
    model: Llama, config: OptimizerConfig, adamw: Callable[..., torch.optim.Optimizer] = FUSED
) -> torch.optim.Optimizer:
    """AdamW over two groups, decayed or not as the norm method says (matrices alone); each parameter in exactly one.

    Args:
        model: whose parameters are trained.
        config: rates.
        adamw: an implementation with torch's arguments.
    """
    architecture = model.config
    method = architecture.norm_method
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if method.decayed(architecture, name, parameter) else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return adamw(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale the gradients to a total norm of at most ``max_norm``; returns the norm before that, fp32 scalar."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    return nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimiser state under ``<parameter name>/<state name>``."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`optimizer_tensors`.

    Raises:
        UserError: the state of a parameter is missing, or belongs to none.
    """
    parameters = dict(model.named_parameters())
    stored: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, key = name.rsplit("/", 1)
        stored.setdefault(parameter, {})[key] = tensor
    wanted = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if stored.keys() != wanted:
        odd = sorted(stored.keys() ^ wanted)[0]
        raise UserError(f"optimiser state does not belong to this model: {odd} is in one and not in the other")
    for name, state in stored.items():
        device = parameters[name].device
        optimizer.state[parameters[name]] = {
            key: value.clone() if key == "step" else value.to(device, copy=True) for key, value in state.items()
        }
