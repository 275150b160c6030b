"""Memory that training takes on each device and each host, term by term, at the moments when it can be largest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

import torch

from llmstack.accounting.activations import Activations, Computation, count_activations
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig

GIB = 2**30

CONTEXT_BYTES = 2 * GIB
"""Assumed of a GPU beside our tensors: CUDA's context, NCCL's channels, workspaces of the libraries."""

FRAGMENTATION = 0.05
"""Assumed share of its tensors' bytes that PyTorch's allocator reserves on a GPU without using them."""

HOST_PROCESS_BYTES = 4 * GIB
"""Assumed of one rank on its host: Python, the libraries, data workers and their batches."""

GATHERED_ELEMENTS = 1_000_000_000
"""Weights that ZeRO-3 leaves whole on a device for their next use, DeepSpeed's ``stage3_max_live_parameters`` and
``stage3_max_reuse_distance`` where a run does not say otherwise."""

_WHOLE_GROUP_REDUCED = 500_000_000
"""Elements up to which ZeRO-1 copies a group of gradients before it reduces them (DeepSpeed's engine)."""


@dataclass(frozen=True)
class Layout:
    """How a run is spread over devices, and what it computes on each."""

    stage: int = 0
    """ZeRO stage; 0: every rank holds all (one device, or DDP)."""
    ranks: int = 1
    """Devices of the whole job."""
    offload: bool = False
    """Optimiser state, and at stage 3 the weights, lie in host memory."""
    micro_batch_size: int = 1
    """Samples of one forward pass."""
    block_size: int = 1024
    """Tokens of each."""
    accumulate: int = 1
    """Micro-batches of an optimiser step."""
    precision: str = "bf16-mixed"
    """As of the trainer: `bf16-mixed` or `32-true`."""
    activation_checkpointing: str | int = "none"
    """As of the run."""
    compile: bool = True
    """As of the run."""
    bucket_elements: int = 50_000_000
    """Gradients or weights that are exchanged at once (DeepSpeed's ``reduce_bucket_size``)."""
    gathered_elements: int = GATHERED_ELEMENTS
    """Weights that stay whole under ZeRO-3."""
    device_type: str = "cuda"
    """`cuda`, or `cpu`, where nothing overlaps and nothing but tensors is counted."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UserError(f"ZeRO stage is {self.stage}; it must be 0 to 3")
        for name in ("ranks", "micro_batch_size", "block_size", "accumulate"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def weight_bytes(self) -> int:
        """Of one weight that is multiplied with: DeepSpeed casts them to bf16, autocast leaves them in fp32."""
        return 2 if self.stage and self.precision == "bf16-mixed" else 4

    @property
    def computation(self) -> Computation:
        """What decides the activations."""
        mixed = self.precision == "bf16-mixed"
        return Computation(
            self.micro_batch_size,
            self.block_size,
            torch.bfloat16 if self.weight_bytes == 2 else torch.float32,
            mixed and self.stage == 0,
            self.activation_checkpointing,
            self.compile,
            self.device_type,
        )


@dataclass(frozen=True)
class Terms:
    """Bytes on one device at one moment."""

    weights: int = 0
    """Those that are multiplied with; under ZeRO-3 the rank's part."""
    gathered: int = 0
    """Weights of other ranks, brought together for use (ZeRO-3)."""
    masters: int = 0
    """fp32 copies of the rank's part of the weights, which the optimiser steps (ZeRO)."""
    optimiser: int = 0
    """Two fp32 moments of AdamW."""
    gradients: int = 0
    """Of weights, in whatever types and copies the strategy keeps them."""
    activations: int = 0
    """Kept for the backward pass, and what the running block needs beside it."""
    logits: int = 0
    """The chunk of logits, its temporaries, and the gradients that the loss has found in its forward pass."""
    buckets: int = 0
    """Copies made for exchanges between ranks, and for the norm of the gradient."""
    overhead: int = 0
    """Context, libraries and fragmentation: assumed, not counted."""

    @property
    def total(self) -> int:
        """Sum."""
        return sum(getattr(self, term.name) for term in fields(self))

    def to_dict(self) -> dict[str, int]:
        """The terms and their ``total``."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a device over one optimiser step."""

    config: ModelConfig
    """Of what model."""
    layout: Layout
    """What was asked."""
    parameters: int
    """Of the model."""
    moments: dict[str, Terms]
    """`forward` (the end of it, with the loss), `backward`, `step` (gradients reduced, optimiser)."""

    @property
    def peak_moment(self) -> str:
        """When most is needed."""
        return max(self.moments, key=lambda moment: self.moments[moment].total)

    @property
    def peak(self) -> Terms:
        """What is there then."""
        return self.moments[self.peak_moment]

    @property
    def total(self) -> int:
        """Bytes that a device must have."""
        return self.peak.total

    def to_dict(self) -> dict[str, object]:
        """As plain JSON values."""
        return {
            "parameters": self.parameters,
            "peak_moment": self.peak_moment,
            "moments": {name: terms.to_dict() for name, terms in self.moments.items()},
        }


@dataclass(frozen=True)
class _Sizes:
    """Numbers of parameters that matter for how they are exchanged."""

    total: int
    largest: int
    head: int
    tied: bool
    blocks: tuple[int, ...]
    decayed: int


@lru_cache(maxsize=32)
def _sizes(config: str) -> _Sizes:
    with torch.device("meta"):
        model = Llama(ModelConfig.from_dict(json.loads(config)))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    method = model.config.norm_method
    return _Sizes(
        sum(counts.values()),
        max(counts.values()),
        model.lm_head.weight.numel(),
        model.config.tie_word_embeddings,
        tuple(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks),
        sum(p.numel() for name, p in model.named_parameters() if method.decayed(model.config, name, p)),
    )


@lru_cache(maxsize=64)
def _activations(config: str, how: Computation) -> Activations:
    return count_activations(ModelConfig.from_dict(json.loads(config)), how)


def training_memory(config: ModelConfig, layout: Layout) -> MemoryEstimate:
    """Bytes on one device while a model trains with AdamW.

    Which tensors exist was read in DeepSpeed 0.19.8 and counted in runs of it (docs/planning.md has each term; the
    tests count again). For Ψ parameters on R ranks the states come to 4 + 4 + 8 bytes a parameter on one device (one
    set of gradients more under DDP, whose buckets stay), and with bf16 weights to 2 + 4 + 12/R, 2 + (4 + 12)/R and
    (2 + 4 + 12)/R at ZeRO stages 1 to 3, where the paper (Rajbhandari et al., arXiv 1910.02054, section 3.1), which
    keeps gradients in fp16, has 2 + 2 + 12/R, 2 + (2 + 12)/R and (2 + 2 + 12)/R.

    Args:
        config: architecture with its vocabulary.
        layout: devices, batch and what is kept.
    """
    if config.vocab_size is None:
        raise UserError("model config: vocab_size is not set; give a number, as --model.config.vocab_size 32000")
    key = json.dumps(config.to_dict())
    sizes, activations = _sizes(key), _activations(key, layout.computation)
    states = _states(sizes.total, layout)
    moments = {
        "forward": _forward(sizes, activations, layout, states),
        "backward": _backward(sizes, activations, layout, states),
        "step": _step(sizes, layout, states),
    }
    return MemoryEstimate(
        config, layout, sizes.total, {name: _with_overhead(each, layout) for name, each in moments.items()}
    )


def _states(parameters: int, layout: Layout) -> Terms:
    """What is there at any moment."""
    share = -(-parameters // layout.ranks)
    host = layout.offload
    if layout.stage == 0:
        return Terms(weights=4 * parameters, optimiser=8 * parameters)
    weights = layout.weight_bytes * (parameters if layout.stage < 3 else 0 if host else share)
    return Terms(weights=weights, masters=0 if host else 4 * share, optimiser=0 if host else 8 * share)


def _forward(sizes: _Sizes, activations: Activations, layout: Layout, states: Terms) -> Terms:
    """At the loss, when all activations are there."""
    last = len(activations.blocks) - 1
    in_block = max(
        activations.ends.kept + sum(part.kept for part in activations.blocks[:layer]) + block.forward_peak
        for layer, block in enumerate(activations.blocks)
    )
    kept = activations.kept
    # Either the loss is at its largest, or a block before it was.
    logits = activations.loss_peak if kept + activations.loss_peak >= in_block or last < 0 else 0
    return replace(
        states,
        gathered=_gathered(sizes, layout),
        gradients=_kept_gradients(sizes, layout),
        activations=kept if logits else in_block,
        logits=logits,
        buckets=_kept_buckets(sizes, layout),
    )


def _kept_gradients(sizes: _Sizes, layout: Layout) -> int:
    """Bytes of gradients that exist already, or still, during the (last) forward pass of a step."""
    share = -(-sizes.total // layout.ranks)
    again = layout.accumulate > 1
    if layout.stage == 0:
        # Lightning lets go of the last step's once the next loss is known.
        return 4 * sizes.total
    if layout.stage == 1 and layout.weight_bytes == 2 and not layout.offload:
        return 4 * sizes.total + (2 * sizes.total if again else 0)
    if layout.stage == 1:
        return 4 * sizes.total if again else 0
    if layout.stage == 2:
        return 4 * share if again else 0
    return 0 if layout.offload else 4 * share


def _kept_buckets(sizes: _Sizes, layout: Layout) -> int:
    """Bytes of buffers that exist at any moment."""
    if layout.stage == 0:
        return 4 * sizes.total if layout.ranks > 1 else 0
    staged = layout.weight_bytes * sizes.largest if layout.offload and layout.stage < 3 else 0
    return staged + (4 * layout.bucket_elements if layout.stage == 3 else 0)


def _gathered(sizes: _Sizes, layout: Layout) -> int:
    """ZeRO-3 brings weights together, and leaves as many of them whole as it may."""
    if layout.stage < 3:
        return 0
    at_least = max(sizes.largest, max(sizes.blocks)) + layout.bucket_elements
    return layout.weight_bytes * min(sizes.total, max(layout.gathered_elements, at_least))


def _backward(sizes: _Sizes, activations: Activations, layout: Layout, states: Terms) -> Terms:
    """The worst of: the loss's own backward pass, each block's, the embedding's."""
    w = layout.weight_bytes
    # The engine holds a tied matrix's gradient from the loss until the embedding's is added to it.
    tied = w * sizes.head if sizes.tied else 0
    base = replace(states, gathered=_gathered(sizes, layout))
    done = sizes.total - sum(sizes.blocks) - (sizes.head if sizes.tied else 0)
    candidates = [
        replace(
            base,
            gradients=_growing_gradients(0, sizes, layout),
            activations=activations.kept,
            logits=activations.loss_backward_peak,
            buckets=_backward_buckets(sizes, layout, 0),
        )
    ]
    below = activations.kept
    for block, count in zip(reversed(activations.blocks), reversed(sizes.blocks), strict=True):
        below -= block.kept
        done += count
        candidates.append(
            replace(
                base,
                gradients=_growing_gradients(done, sizes, layout) + tied,
                activations=below + block.backward_peak,
                buckets=_backward_buckets(sizes, layout, min(layout.bucket_elements, sizes.largest)),
            )
        )
    # The embedding's gradient is dense; fp32 before it is the weights' under autocast.
    candidates.append(
        replace(
            base,
            gradients=_growing_gradients(sizes.total, sizes, layout) + tied,
            activations=activations.ends.kept,
            buckets=_backward_buckets(sizes, layout, sizes.largest),
        )
    )
    return max(candidates, key=lambda terms: terms.total)


def _growing_gradients(done: int, sizes: _Sizes, layout: Layout) -> int:
    """Bytes of gradients when those of ``done`` parameters have been found in this backward pass."""
    share, w = -(-sizes.total // layout.ranks), layout.weight_bytes
    again = layout.accumulate > 1
    if layout.stage == 0:
        return 4 * (sizes.total if again else done)
    if layout.stage == 1 and w == 2 and not layout.offload:
        return 4 * sizes.total + 2 * (sizes.total if again else done)
    if layout.stage == 1:
        return 4 * (sizes.total if again else done)
    if layout.stage == 2:
        return 4 * share if done or again else 0
    return 0 if layout.offload else 4 * share


def _backward_buckets(sizes: _Sizes, layout: Layout, reduced: int) -> int:
    """Bytes of buffers when ``reduced`` elements are being exchanged.

    Stages 1 and 2 stage gradients in one bucket, two where exchanges overlap; a parameter larger than a bucket is
    reduced by itself. Either way a copy is exchanged in fp32.
    """
    if layout.stage in (0, 3) or (layout.stage == 1 and layout.weight_bytes == 2 and not layout.offload):
        copies = 4 * reduced if layout.stage == 3 and layout.weight_bytes == 2 else 0
        own = layout.weight_bytes * reduced if layout.stage == 3 and reduced > layout.bucket_elements else 0
        return _kept_buckets(sizes, layout) + copies + own
    overlapping = layout.device_type == "cuda"
    staged = (2 if overlapping else 1) * layout.weight_bytes * layout.bucket_elements
    copies = 4 * reduced if layout.weight_bytes == 2 else 0
    own = layout.weight_bytes * reduced if reduced > layout.bucket_elements else 0
    return _kept_buckets(sizes, layout) + staged + copies + own


def _step(sizes: _Sizes, layout: Layout, states: Terms) -> Terms:
    """The last gradients are reduced, their norm is taken, and the optimiser steps."""
    share, w = -(-sizes.total // layout.ranks), layout.weight_bytes
    # DeepSpeed takes the norm of one gradient after another in fp64.
    norm = 0 if layout.stage == 0 or layout.offload else 8 * min(sizes.largest, share)
    buckets = _kept_buckets(sizes, layout)
    if layout.stage == 0:
        gradients = 4 * sizes.total
    elif layout.stage == 1 and w == 2 and not layout.offload:
        # fp32 accumulators beside the bf16 gradients; groups of gradients are joined in a copy to be reduced.
        gradients = 6 * sizes.total
        norm = max(norm, 4 * sizes.total if sizes.decayed <= _WHOLE_GROUP_REDUCED and layout.ranks > 1 else 0)
    elif layout.stage == 1:
        gradients = 4 * sizes.total + 4 * share
        norm = 4 * layout.bucket_elements
    elif layout.stage == 2:
        # fp32 weights: the optimiser's gradient is a joined copy.
        gradients = 4 * share * (1 if w == 2 else 2)
        norm = norm if w == 2 else 0
    else:
        gradients = 0 if layout.offload else 2 * 4 * share
        norm = 0
    return replace(states, gradients=gradients, buckets=buckets + norm)


def _with_overhead(terms: Terms, layout: Layout) -> Terms:
    if layout.device_type != "cuda":
        return terms
    return replace(terms, overhead=CONTEXT_BYTES + int(FRAGMENTATION * terms.total))


def host_memory_bytes(parameters: int, layout: Layout, ranks_per_node: int) -> int:
    """Memory that a run takes on one node's host, its cache of files not counted.

    Each rank: its process (assumed, ``HOST_PROCESS_BYTES``); while it starts, the whole fp32 model (ZeRO-3 builds a
    module at a time), later the copy of its share of a checkpoint (weights and moments in fp32), and with offload the
    masters, moments and gradients that it steps on the host, with the weights under ZeRO-3.
    """
    share = -(-parameters // layout.ranks)
    starting = 4 * parameters if layout.stage < 3 else 4 * share
    offloaded = 0
    if layout.offload:
        # Stages 1 and 2 keep a pinned copy of the weights on their way back; stage 3 the weights themselves.
        offloaded = (4 + 8 + 4 + layout.weight_bytes) * share
    running = 12 * share + offloaded
    return min(layout.ranks, ranks_per_node) * (HOST_PROCESS_BYTES + max(starting, running))


def require_fit(estimate: MemoryEstimate, device_memory_bytes: int, device: str = "a device") -> None:
    """Refuse a run that a device cannot hold.

    Raises:
        UserError: with the smallest change that would make it fit.
    """
    if estimate.total <= device_memory_bytes:
        return
    peak = estimate.peak
    largest = sorted((name for name in asdict(peak)), key=lambda name: -getattr(peak, name))[:3]
    parts = ", ".join(f"{name} {getattr(peak, name) / GIB:.1f}" for name in largest)
    raise UserError(
        f"the run needs {estimate.total / GIB:.1f} GiB of {device} (in its {estimate.peak_moment} phase: {parts}), "
        f"which has {device_memory_bytes / GIB:.1f}; {_remedy(estimate, device_memory_bytes)}"
    )


def _remedy(estimate: MemoryEstimate, device_memory_bytes: int) -> str:
    sizes = _sizes(json.dumps(estimate.config.to_dict()))
    for names, layout in _changes(estimate.layout):
        if _with_overhead(_step(sizes, layout, _states(sizes.total, layout)), layout).total > device_memory_bytes:
            # Too much without any activation, which would take seconds to count.
            continue
        total = training_memory(estimate.config, layout).total
        if total <= device_memory_bytes:
            return f"it fits with {' and '.join(names)} ({total / GIB:.1f} GiB)"
    return "nothing makes it fit: neither sharing, checkpointing, smaller micro-batches, offload nor 1,024 devices"


def _changes(layout: Layout) -> Iterator[tuple[list[str], Layout]]:
    """One change after another, the smallest first: what costs least speed; then all of them together."""
    yield from _checkpointing(layout, "selective")
    yield from _higher_stages(layout)
    yield from _smaller_batches(layout)
    yield from _checkpointing(layout, "full")
    highest = max([layout.stage, *(changed.stage for _, changed in _higher_stages(layout))])
    least = replace(layout, stage=highest)
    both = [f"trainer/zero{highest}.yaml"] if highest != layout.stage else []
    if both:
        for kind in ("selective", "full"):
            yield from ((both + names, changed) for names, changed in _checkpointing(least, kind))
    for names, changed in _checkpointing(least, "full"):
        least, both = changed, both + names
    if least != layout:
        yield from ((both + names, changed) for names, changed in _smaller_batches(least))
    for names, changed in list(_smaller_batches(least))[-1:]:
        least, both = changed, both + names
    shared = replace(least, stage=max(least.stage, 3 if layout.stage or layout.ranks > 1 else 2))
    named = both if shared.stage == least.stage else [f"trainer/zero{shared.stage}.yaml", *both]
    for ranks in (2**power for power in range(1, 11)):
        if ranks > layout.ranks:
            yield [*named, f"{ranks} devices"], replace(shared, ranks=ranks)
    if not layout.offload:
        offloaded = replace(least, stage=3, offload=True)
        yield ["trainer/zero3_offload.yaml", *(name for name in both if "zero" not in name)], offloaded


def _checkpointing(layout: Layout, kind: str) -> Iterator[tuple[list[str], Layout]]:
    if layout.activation_checkpointing not in (kind, "full"):
        yield [f"model.activation_checkpointing {kind}"], replace(layout, activation_checkpointing=kind)


def _higher_stages(layout: Layout) -> Iterator[tuple[list[str], Layout]]:
    for stage in range(layout.stage + 1, 4 if layout.ranks > 1 else 0):
        yield [f"trainer/zero{stage}.yaml"], replace(layout, stage=stage)


def _smaller_batches(layout: Layout) -> Iterator[tuple[list[str], Layout]]:
    """Half, and half again, at the same global batch."""
    size, accumulate = layout.micro_batch_size, layout.accumulate
    while size % 2 == 0:
        size, accumulate = size // 2, accumulate * 2
        names = [f"data.micro_batch_size {size} (trainer.accumulate_grad_batches {accumulate})"]
        yield names, replace(layout, micro_batch_size=size, accumulate=accumulate)
