"""A look at what flows through a model: an eager forward pass beside the training, without gradients. Torch only.

Statistics never come from the training forward itself: compiled it has no hooks, and recomputed it would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    with looking(model, [(module, _storing(found, name, of)) for name, (module, of) in observed.items()]):
        model.hidden_states(batch["input_ids"], document_ids=batch.get("document_ids"))
    return found


@contextmanager
def looking(model: nn.Module, watched: Iterable[tuple[nn.Module, Callable[..., None]]]) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode and not compiled, and what is ``watched`` hooks the inputs of modules.

    Afterwards the whole model is in the mode that it was in.
    """
    training = model.training
    with ExitStack() as stack:
        for module, hook in watched:
            stack.callback(module.register_forward_pre_hook(hook).remove)
        stack.callback(model.train, training)
        model.eval()
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _storing(found: dict[str, Tensor], name: str, measure: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found[name] = measure(inputs[0])

    return hook
