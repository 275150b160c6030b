"""A model whose weights, gradients or optimiser state ZeRO has sharded, parameter by parameter (DeepSpeed).

Imported where a run is sharded alone. Stage 3 leaves an empty tensor in place of each parameter and gathers it in the
forward of the module that owns it; everything else reads it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from llmstack.model import Llama, ModelConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_sharded(
    config: ModelConfig, fill: Callable[[Llama, str, nn.Module], None], dtype: torch.dtype, settings: dict[str, Any]
) -> Llama:
    """A model of which no rank ever holds more than one module whole.

    Args:
        config: architecture.
        fill: gives the named module, whose own parameters are whole at that moment, its initial or stored values.
        dtype: of the parameters; buffers stay as the model makes them.
        settings: configuration of DeepSpeed.
    """
    with torch.device("meta"):
        model = Llama(config)
    model.tie()
    for name, module in model.named_modules():
        _materialise(module)
        fill(model, name, module)
        own = [parameter for parameter in module.parameters(recurse=False) if not is_zero_param(parameter)]
        for parameter in own:
            parameter.data = parameter.data.to(dtype)
        if own:
            deepspeed.zero.Init(module=module, config_dict_or_path=settings, mem_efficient_linear=False)
        model.tie()
    return model


def _materialise(module: nn.Module) -> None:
    """Memory for what the module itself owns and has none yet."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def gather(parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Whole parameters inside the context, on every rank, for reading (a ``Gather`` of the norm methods)."""
    return deepspeed.zero.GatheredParameters([p for p in parameters if is_zero_param(p)])


def full_tensors(model: Llama, optimizer: Any, steps: int) -> Iterator[tuple[str, Tensor]]:
    """Optimiser state and fp32 weights as ``(name, tensor)``; every rank must go through all of it.

    Names are those of parameters, and ``<parameter name>/<state name>`` for the optimiser's.
    """
    _link_states(optimizer)
    for name, parameter in model.named_parameters():
        yield name, safe_get_full_fp32_param(parameter)
        for moment in MOMENTS:
            yield f"{name}/{moment}", safe_get_full_optimizer_state(parameter, moment)
        yield f"{name}/step", torch.tensor(float(steps))


def restore(model: Llama, optimizer: Any, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    """Set the fp32 master weights and, unless ``moments`` is empty, the optimiser state.

    Args:
        model: loaded with the same weights already, in its own dtype.
        optimizer: DeepSpeed's.
        weights: by parameter name, fp32.
        moments: by ``<parameter name>/<state name>``.
    """
    if moments:
        _make_states_exist(optimizer)
        _link_states(optimizer)
        for state in optimizer.optimizer.state.values():
            step = moments[next(name for name in moments if name.endswith("/step"))]
            state["step"] = step.clone() if isinstance(state["step"], Tensor) else int(step)
    for name, parameter in model.named_parameters():
        _set(parameter, weights[name].float(), None)
        for moment in MOMENTS if moments else ():
            _set(parameter, moments[f"{name}/{moment}"], moment)


def _set(parameter: nn.Parameter, value: Tensor, moment: str | None) -> None:
    if not is_zero_param(parameter):
        if moment is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, moment)
        return
    # DeepSpeed's setter of whole tensors fails where the ranks do not divide the size: give each its part, padded.
    size, rank = parameter.partition_numel(), torch.distributed.get_rank()  # type: ignore[attr-defined]
    part = value.flatten()[rank * size : (rank + 1) * size]
    part = torch.nn.functional.pad(part, (0, size - part.numel()))
    if moment is None:
        safe_set_local_fp32_param(parameter, part)
    else:
        safe_set_local_optimizer_state(parameter, part, moment)


def _make_states_exist(optimizer: Any) -> None:
    """Have the optimiser make its moments, by a step of learning rate 0 on gradients of 0, which changes nothing."""
    base = optimizer.optimizer
    for group in base.param_groups:
        group["lr"] = 0.0
    masters = _masters(optimizer)
    buffers = [master.grad for master in masters]  # of stages 1 and 2 with offload, which keep them for good
    for master in masters:
        master.grad = torch.zeros_like(master)
    if hasattr(optimizer, "_optimizer_step"):
        for index in range(len(masters)):
            optimizer._optimizer_step(index)
    else:
        base.step()
    for master, buffer in zip(masters, buffers, strict=True):
        master.grad = buffer


def _link_states(optimizer: Any) -> None:
    """Let parameters find their moments. DeepSpeed's stages 1 and 2 do this once, after the first of several parameter
    groups has been stepped, when those of the others do not exist yet.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _masters(optimizer: Any) -> list[Tensor]:
    """The flat fp32 partitions of this rank under their name of each kind of DeepSpeed's optimisers."""
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
    return next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
