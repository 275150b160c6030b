"""What a model keeps between forward and backward pass, counted on tensors without memory.

A formula for it would have to follow every norm method, every saved tensor of PyTorch and every choice of the
compiler's; here the blocks themselves run at their real shape on fake tensors, which have sizes and no contents.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmstack.model import Llama, ModelConfig
from llmstack.model.head import SLAB_ROWS, chunk_rows, loss_and_gradient_
from llmstack.model.llama import Block
from llmstack.model.recompute import recompute_of_layer


@dataclass(frozen=True)
class Computation:
    """Everything that decides how large the activations of one forward pass are."""

    micro_batch_size: int
    """Samples of one forward pass."""
    block_size: int
    """Tokens of each."""
    weight_dtype: torch.dtype = torch.float32
    """Of the weights that are multiplied with; the optimiser's masters are not meant."""
    autocast: bool = False
    """Compute in bf16 over fp32 weights (else in the type of the weights)."""
    activation_checkpointing: str | int = "none"
    """`none`, `full`, `selective`, or a number, as of a run."""
    compile: bool = True
    """Blocks and loss are compiled."""
    device_type: str = "cuda"
    """The loss takes larger chunks on `cuda` than on `cpu`."""

    @property
    def dtype(self) -> torch.dtype:
        """In which matrix products are computed and the residual stream is kept."""
        return torch.bfloat16 if self.autocast else self.weight_dtype

    @property
    def tokens(self) -> int:
        """Of one forward pass."""
        return self.micro_batch_size * self.block_size


class Part(NamedTuple):
    """Bytes of one part of the model, its weights and their gradients left out."""

    kept: int
    """From its forward to its backward pass: its output and what it saved, not its input."""
    forward_peak: int
    """Most in its forward pass."""
    backward_peak: int
    """Most in its backward pass, what it kept included."""


@dataclass(frozen=True)
class Activations:
    """Of a whole model, in bytes."""

    ends: Part
    """Embedding, rotary tables and final norm."""
    blocks: tuple[Part, ...]
    """In order."""
    loss_kept: int
    """Gradients that the loss has found already when the forward pass ends: of the hidden states, and of the head."""
    loss_peak: int
    """Most in the loss, what it keeps included."""
    loss_backward_peak: int
    """Most in the loss's backward pass, which turns them into the type of the weights."""

    @property
    def kept(self) -> int:
        """At the end of the last block's forward pass."""
        return self.ends.kept + sum(block.kept for block in self.blocks)


def count_activations(config: ModelConfig, how: Computation) -> Activations:
    """The activations of ``config``, measured at the real shape on tensors without memory (seconds, no gigabytes)."""
    with FakeTensorMode(allow_non_fake_inputs=True), _quiet_compiler():
        model = Llama(config).train()
        _cast_parameters(model, how.weight_dtype)
        counted: dict[tuple[str, str], Part] = {}
        blocks = []
        for layer, block in enumerate(model.blocks):
            block.recompute = recompute_of_layer(how.activation_checkpointing, layer)
            # Blocks of the same build keep the same; rates and gains do not matter.
            key = (repr(block), block.recompute)
            if key not in counted:
                counted[key] = _count_block(model, block, how)
            blocks.append(counted[key])
        ends = _count_ends(model, how)
        return Activations(ends, tuple(blocks), *_count_loss(model, how))


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Its advice on recomputation is for those who wrote the model, and given once a process."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """As DeepSpeed does (``Module.to`` swaps tensors, which fake ones do not allow). Tied ones stay tied."""
    cast: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in cast:
                    cast[parameter] = nn.Parameter(parameter.detach().to(dtype))
                module._parameters[name] = cast[parameter]
                # Gradients of weights are counted where they are kept.
                cast[parameter].register_post_accumulate_grad_hook(_drop_gradient)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _count_block(model: Llama, block: Block, how: Computation) -> Part:
    def forward(x: Tensor) -> Tensor:
        rotation = model.rotary(_positions(how)) if model.rotary is not None else None
        return block(x, rotation, None, None, _positions(how))

    x = torch.empty(how.micro_batch_size, how.block_size, model.config.hidden_size, dtype=how.dtype, requires_grad=True)
    return _count_compiled(block, forward, x, how) if how.compile else _count_eager(forward, x, how)


def _count_ends(model: Llama, how: Computation) -> Part:
    """A model without its blocks."""
    blocks, model.layers = model.layers, nn.ModuleList()
    ids = torch.zeros(how.micro_batch_size, how.block_size, dtype=torch.long)
    part = _count_eager(lambda ids: model.norm(model.residual_stream(ids)), ids, how)
    rotation = 0
    if model.rotary is not None and len(blocks):
        rotation = sum(_bytes(table) for table in tree_leaves(model.rotary(_positions(how))))
    model.layers = blocks
    return Part(part.kept + rotation, part.forward_peak + rotation, part.backward_peak + rotation)


def _positions(how: Computation) -> Tensor:
    return torch.arange(how.block_size)[None]


@contextmanager
def _precision(how: Computation) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how.autocast):
        yield


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, place, size)

    def _remove(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


def _count_eager(forward: Callable[[Tensor], Tensor], x: Tensor, how: Computation) -> Part:
    with _LiveBytes() as memory:
        with _precision(how):
            output = forward(x)
        gc.collect()
        kept, forward_peak = memory.live, memory.peak
        memory.peak = memory.live
        output.backward(torch.empty_like(output))
        return Part(kept, forward_peak, memory.peak)


def _count_compiled(block: Block, forward: Callable[[Tensor], Tensor], x: Tensor, how: Computation) -> Part:
    """By the graphs that AOTAutograd makes for Inductor: what the first returns, the second is given."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[fx.GraphModule] = []

    def note(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return _boxed(graph)

    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    plain = block.forward
    block.forward = torch.compile(plain, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    try:
        with _precision(how):
            output = forward(x)
        output.backward(torch.empty_like(output))
    finally:
        block.forward = plain  # type: ignore[method-assign]
        torch._dynamo.reset()
    there, back = graphs
    return Part(_returned_bytes(there), _fused_peak(there), _fused_peak(back))


def _boxed(graph: fx.GraphModule) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)


def _returned_bytes(graph: fx.GraphModule) -> int:
    """Of the results of a graph that are not its arguments."""
    given = {_storage(node) for node in graph.graph.nodes if node.op == "placeholder"}
    returned = {_storage(node): node for node in graph.graph.output_node().all_input_nodes}
    return sum(_storage_bytes(node) for storage, node in returned.items() if storage and storage not in given)


def _fused_peak(graph: fx.GraphModule) -> int:
    """Most bytes that a graph holds when what it computes element by element is fused into what reads it.

    Weights and inputs of the forward pass, which others hold, are left out; what it saved for the backward pass is let
    go after its last use there.
    """
    nodes = list(graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    last_read: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        readers = [place[user] if _in_memory(user) else last_read[user] for user in node.users]
        last_read[node] = max(readers, default=place[node])
    lives: dict[int, list[int]] = {}
    for node in nodes:
        storage = _storage(node)
        if storage is not None and (_in_memory(node) or storage in lives):
            start, end, size = lives.get(storage, [place[node], 0, _storage_bytes(node)])
            # What a graph is given is there from its beginning.
            lives[storage] = [0 if node.op == "placeholder" else start, max(end, last_read[node]), size]
    for node in nodes:
        if node.op == "placeholder" and node.name.startswith("primals"):
            lives.pop(_storage(node) or 0, None)
    changes = [0] * (len(nodes) + 1)
    for start, end, size in lives.values():
        changes[start] += size
        changes[end + 1 if end + 1 <= len(nodes) else len(nodes)] -= size
    peak = live = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _in_memory(node: fx.Node) -> bool:
    """Whether a kernel of its own writes it: unless it is element-wise and all that read it can compute it."""
    if node.op in ("placeholder", "output"):
        return True
    return not _fusible(node) or any(not (_fusible(user) or _reduces(user)) for user in node.users)


def _fusible(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or getattr(node.target, "is_view", False) or node.target in _ELEMENTWISE


_ELEMENTWISE = frozenset((torch.ops.prims.convert_element_type.default, torch.ops.aten.expand.default))


def _reduces(node: fx.Node) -> bool:
    return node.target in _REDUCTIONS


_REDUCTIONS = frozenset(
    (
        torch.ops.aten.sum.dim_IntList,
        torch.ops.aten.sum.default,
        torch.ops.aten.mean.dim,
        torch.ops.aten.mean.default,
        torch.ops.aten.amax.default,
        torch.ops.aten.var_mean.correction,
    )
)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _storage_bytes(node: fx.Node) -> int:
    size = node.meta["val"].untyped_storage().nbytes()
    # The state of the random numbers that recomputation keeps (kilobytes, on the host) has no size to the compiler.
    return size if isinstance(size, int) else 0


def _count_loss(model: Llama, how: Computation) -> tuple[int, int, int]:
    """``loss_kept``, ``loss_peak`` and ``loss_backward_peak`` of the chunked head, whose gradients come in its forward.

    What it makes, in order: weights in the compute type, the two gradients, and for each chunk the logits, what the
    loss kernel needs beside them and the products that are added to the gradients.
    """
    head, width = model.lm_head, model.config.hidden_size
    vocabulary = head.weight.shape[0]
    low, wide = how.dtype.itemsize, max(how.dtype.itemsize, 4)
    rows = chunk_rows(how.tokens, vocabulary, how.device_type)
    cast_weights = 0 if how.dtype == how.weight_dtype else vocabulary * width * low
    grad_hidden = how.tokens * width * low
    grad_weight = vocabulary * width * wide
    logits = torch.empty(rows, vocabulary, dtype=how.dtype)
    with _LiveBytes() as memory, torch.no_grad():
        loss_and_gradient_(logits, torch.zeros(rows, dtype=torch.long), torch.ones(()))
    # Compiled, the passes over the vocabulary have no temporaries.
    kernel = 0 if how.compile else memory.peak
    products = max(rows * width, 0 if low == wide else min(SLAB_ROWS, vocabulary) * width) * low
    kept = grad_hidden + grad_weight
    peak = kept + cast_weights + _bytes(logits) + max(kernel, products)
    in_weight_dtype = 0 if how.weight_dtype.itemsize == wide else vocabulary * width * how.weight_dtype.itemsize
    return kept, peak, kept + in_weight_dtype


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
