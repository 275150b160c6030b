"""What a checkpoint holds of a run's tensors, read and set under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from llmstack.checkpoint import Checkpoint, host_copy
from llmstack.checkpoint.tensors import TensorFiles
from llmstack.ranks import Ranks
from llmstack.training.module import LanguageModel
from llmstack.training.optim import optimizer_tensors, restore_optimizer

Tensors = dict[str, Tensor]


def share_of_state(module: LanguageModel, optimizer: Any, ranks: Ranks) -> tuple[Tensors, Tensors]:
    """This rank's share of weights (with persistent buffers) and optimiser state, copied to host memory.

    Every rank calls it at the same point. The shares are disjoint, together complete, and of about equal size.
    """
    shares: dict[str, Tensors] = {"model": {}, "optimizer": {}}
    load = [0] * ranks.world_size
    for kind, name, tensor in _all_tensors(module, optimizer):
        owner = load.index(min(load))
        load[owner] += tensor.numel() * tensor.element_size()
        if owner == ranks.rank:
            shares[kind][name] = host_copy(tensor)
    return shares["model"], shares["optimizer"]


def _all_tensors(module: LanguageModel, optimizer: Any) -> Iterator[tuple[Literal["model", "optimizer"], str, Tensor]]:
    model = module.decoder
    if module.zero is None:
        for name, tensor in model.state_dict().items():
            yield "model", name, tensor.detach()
        for name, tensor in optimizer_tensors(model, optimizer).items():
            yield "optimizer", name, tensor
        return
    from llmstack.training.sharding import full_tensors

    parameters = dict(model.named_parameters())
    for name, tensor in full_tensors(model, optimizer, module.global_step):
        yield ("model" if name in parameters else "optimizer"), name, tensor
    for name, buffer in model.state_dict().items():
        if name not in parameters:
            yield "model", name, buffer


def restore_state(module: LanguageModel, optimizer: Any, checkpoint: Checkpoint) -> None:
    """Set the optimiser state, and the fp32 weights where the model's own are not they.

    The module was built with the checkpoint's weights already.
    """
    moments = checkpoint.optimizer()
    if module.zero is None:
        restore_optimizer(module.decoder, optimizer, moments)
        return
    from llmstack.training.sharding import restore

    restore(module.decoder, optimizer, checkpoint.weights(), moments)


def restore_masters(module: LanguageModel, optimizer: Any, weights: TensorFiles) -> None:
    """Set the fp32 weights that a new run starts from, where the strategy cast the model's own."""
    if module.zero is not None:
        from llmstack.training.sharding import restore

        restore(module.decoder, optimizer, weights, {})
