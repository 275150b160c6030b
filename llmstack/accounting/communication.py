"""What the ranks of a job exchange in each step, and how long that takes over NVLink and the network between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmstack.accounting.memory import Layout

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class Exchange:
    """One tensor's worth of a collective operation, made some number of times a step."""

    what: str
    """`gradients` or `weights`."""
    collective: Collective
    """Which; an all-reduce moves twice what the two others do."""
    elements: int
    """Of the whole tensor."""
    bytes_each: int
    """Of one element as it is sent."""
    times: int
    """In one optimiser step."""
    hides: bool
    """Whether computation goes on beside it."""


@dataclass(frozen=True)
class Links:
    """What connects the devices. Rates are of one device, in one direction, as their makers state them."""

    nvlink_gbps: float
    """Gbit/s within a node."""
    network_gbps: float
    """Gbit/s between nodes."""
    achieved: float = 0.8
    """Assumed share of those rates that collectives of large buckets get."""
    nvlink_seconds: float = 5e-6
    """Assumed latency of a hop within a node."""
    network_seconds: float = 15e-6
    """Assumed latency of a hop between nodes."""
    hidden: float = 0.8
    """Assumed share of the computation beside which an exchange that can hide really proceeds."""

    def seconds(self, collective: Collective, size: float, ranks: int, ranks_per_node: int) -> float:
        """Time of one collective over a tensor of ``size`` bytes.

        A ring moves (R-1)/R of the tensor through each device to reduce-scatter it, as much again to gather it, and
        both to all-reduce it (Patarasuk & Yuan, J. Parallel Distrib. Comput. 69, 2009, section 4: no algorithm moves
        less). Over nodes it is made in levels, as NCCL does it: within each node over NVLink, and of the G devices of a
        node each exchanges its G-th part with its likes on the N nodes over its own network port. Between nodes an
        all-reduce runs along trees (log2 N hops each way), the two others along a ring (N-1 hops).
        """
        within = min(ranks, ranks_per_node)
        nodes = -(-ranks // ranks_per_node)
        passes = 2 if collective == "all_reduce" else 1
        nvlink, network = (self.achieved * rate * 1e9 / 8 for rate in (self.nvlink_gbps, self.network_gbps))
        there = (within - 1) / within * size / nvlink + (nodes - 1) / nodes * size / within / network
        between = math.ceil(math.log2(nodes)) if collective == "all_reduce" else nodes - 1
        hops = (within - 1) * self.nvlink_seconds + between * self.network_seconds
        return passes * (there + hops)


def exchanges(parameters: int, layout: Layout) -> list[Exchange]:
    """What an optimiser step sends (Rajbhandari et al., arXiv 1910.02054, section 7), as DeepSpeed 0.19.8 does it.

    Gradients go in fp32. DDP and ZeRO-1 send them once a step; ZeRO-2 and 3, which keep no whole gradients, with each
    micro-batch. ZeRO-2 all-reduces its buckets although each rank needs a part of them alone (DeepSpeed's
    ``use_multi_rank_bucket_allreduce``): twice the paper's volume. ZeRO-3 gathers each weight for the forward pass and
    again for the backward pass, except those that ``gathered_elements`` lets it leave whole.
    """
    if layout.ranks == 1:
        return []
    weight = layout.weight_bytes
    if layout.stage == 0:
        return [Exchange("gradients", "all_reduce", parameters, 4, 1, hides=True)]
    stepped = Exchange("weights", "all_gather", parameters, weight, 1, hides=False)
    if layout.stage == 1:
        # With bf16 weights after the backward pass, in one go.
        return [Exchange("gradients", "all_reduce", parameters, 4, 1, hides=weight == 4), stepped]
    if layout.stage == 2:
        return [Exchange("gradients", "all_reduce", parameters, 4, layout.accumulate, hides=True), stepped]
    again = max(parameters - layout.gathered_elements, 0)
    return [
        Exchange("weights", "all_gather", parameters, weight, layout.accumulate, hides=True),
        *([Exchange("weights", "all_gather", again, weight, layout.accumulate, hides=True)] if again else []),
        Exchange("gradients", "reduce_scatter", parameters, 4, layout.accumulate, hides=True),
    ]


def sent_bytes(exchange: Exchange, ranks: int) -> float:
    """What one device sends of it in a step: 2(R-1)/R of the tensor in an all-reduce, (R-1)/R in the others."""
    passes = 2 if exchange.collective == "all_reduce" else 1
    return passes * (ranks - 1) / ranks * exchange.elements * exchange.bytes_each * exchange.times


def exposed_seconds(
    parameters: int, layout: Layout, links: Links, ranks_per_node: int, compute_seconds: float
) -> tuple[float, float]:
    """Seconds of all exchanges of a step, and of those what the step becomes longer by.

    What can hide does so behind ``hidden`` of the computation. A collective is made a bucket at a time, each with
    its latency, and the last bucket of each has nothing left to hide behind.
    """
    hiding = shown = tail = 0.0
    for exchange in exchanges(parameters, layout):
        size = exchange.elements * exchange.bytes_each
        # Not hidden: one operation over whole groups.
        bucket = min(size, layout.bucket_elements * exchange.bytes_each) if exchange.hides else size
        one = links.seconds(exchange.collective, bucket, layout.ranks, ranks_per_node)
        seconds = one * size / bucket * exchange.times
        if exchange.hides:
            hiding += seconds
            tail = max(tail, one)
        else:
            shown += seconds
    return hiding + shown, shown + max(hiding - links.hidden * compute_seconds, tail)
