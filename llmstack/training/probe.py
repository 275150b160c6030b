"""A look at what flows through a model: an eager forward pass beside the training, without gradients. Torch only.

Statistics never come from the training forward itself: compiled it has no hooks, and recomputed it would count twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmstack.model import Llama
from llmstack.model.norms.method import Observed


@torch.no_grad()
def probe(model: Llama, batch: Mapping[str, Any], observed: Mapping[str, Observed]) -> dict[str, Tensor]:
    """What is ``observed`` of the samples in ``batch``, by the same names.

    The model is in evaluation mode meanwhile (no dropout), and not compiled.

    Args:
        model: whole, or sharded; then every rank must probe.
        batch: ``input_ids`` [batch, seq], optionally ``document_ids`` [batch, seq].
        observed: modules, and what of their inputs is wanted.
    """
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, (module, measure) in observed.items():
            stack.callback(module.register_forward_pre_hook(_storing(found, name, measure)).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.hidden_states(batch["input_ids"], document_ids=batch.get("document_ids"))
    return found


def _storing(found: dict[str, Tensor], name: str, measure: Any) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found[name] = measure(inputs[0])

    return hook


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and the whole model in the mode that it was in afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
