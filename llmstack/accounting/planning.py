"""What a run will take before it is paid for: memory, time, energy and disk, from one configuration."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmstack.accounting.communication import Links, exchanges, exposed_seconds, sent_bytes
from llmstack.accounting.devices import Gpu, device_peak_flops
from llmstack.accounting.flops import model_flops_per_token
from llmstack.accounting.memory import GIB, Layout, MemoryEstimate, host_memory_bytes, training_memory
from llmstack.checkpoint import checkpoint_bytes
from llmstack.checkpoint.metrics import MetricsFile
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig

HOST_POWER = 0.4
"""Assumed power of a node beside its GPUs, as a share of theirs (DGX H100: 10.2 kW, of which the GPUs are 5.6)."""

PUE = 1.2
"""Assumed energy of the building for each unit that reaches a node."""

PCIE_BYTES_PER_SECOND = 20e9
"""Assumed rate between a GPU and its host, in one direction."""

HOST_BYTES_PER_SECOND = 150e9
"""Assumed rate of a node's memory under DeepSpeed's CPU Adam, which reads and writes 28 bytes a parameter."""

SCALES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Devices that scaling is given for."""


@dataclass(frozen=True)
class Hardware:
    """The machine a run is planned for."""

    name: str
    """Of the GPU."""
    gpu: Gpu
    """Its figures."""
    nodes: int
    """Of the job."""
    gpus_per_node: int
    """Of each."""

    @property
    def gpus(self) -> int:
        """Of the job."""
        return self.nodes * self.gpus_per_node

    @property
    def links(self) -> Links:
        """Between them."""
        return Links(self.gpu.nvlink_gbps, self.gpu.network_gbps)

    @property
    def memory_bytes(self) -> int:
        """Of one GPU."""
        return int(self.gpu.memory_gib * GIB)


@dataclass(frozen=True)
class Speed:
    """How fast one GPU is before it has to talk to others."""

    tokens_per_second: float
    """Of the model."""
    source: str
    """Where that comes from, to be printed."""


@dataclass(frozen=True)
class Scaling:
    """One number of devices."""

    gpus: int
    """Of the job."""
    step_seconds: float
    """Of one optimiser step."""
    exchange_seconds: float
    """Exchanges in it, hidden or not."""
    tokens_per_second: float
    """Of the job."""
    efficiency: float
    """Of that many GPUs that would have nothing to exchange."""


def stated_speed(config: ModelConfig, layout: Layout, gpu_name: str, efficiency: float) -> Speed:
    """From an MFU of one GPU that recomputes nothing; what activation checkpointing computes again takes its time, too.

    A forward pass is a third of the FLOPs of a step: recomputing every block whole adds a third to its time, every k-th
    a third of 1/k; recomputing what is cheap (selective) is taken as free.

    Raises:
        UserError: the GPU's peak is not known.
    """
    dtype = torch.bfloat16 if layout.precision == "bf16-mixed" else torch.float32
    peak = device_peak_flops(gpu_name, dtype)
    if peak is None:
        raise UserError(f"the peak of {gpu_name} in {dtype} is not known: give --bench a measured speed")
    again = _recomputed_share(layout.activation_checkpointing, config.num_layers)
    flops = model_flops_per_token(config, layout.block_size)
    per_second = efficiency * peak / flops / (1 + again / 3)
    note = f", less {again / (3 + again):.0%} for recomputation" if again else ""
    return Speed(
        per_second, f"efficiency {efficiency:g} of {peak / 1e12:g} TFLOP/s at {flops:.4g} FLOP/token (PaLM){note}"
    )


def _recomputed_share(checkpointing: str | int, layers: int) -> float:
    if isinstance(checkpointing, int):
        return len(range(0, layers, checkpointing)) / layers
    return 1.0 if checkpointing == "full" else 0.0


def measured_speed(path: Path) -> Speed:
    """From a run's ``metrics.csv`` (median over its steps) or a bench's JSON: ``tokens_per_second_per_device``.

    Raises:
        UserError: the file holds no such figure.
    """
    name = "tokens_per_second_per_device"
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if path.suffix == ".csv":
        values = [row[name] for row in MetricsFile(path).read() if row[name] is not None]
        value, what = (statistics.median(values), f"median of {len(values)} steps") if values else (None, "")
    else:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not readable as JSON: {error}") from error
        value, what = content.get(name) if isinstance(content, dict) else None, "bench"
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"{path} has no {name} above 0")
    return Speed(float(value), f"measured: {what}, {path}")


def scaling(parameters: int, layout: Layout, hardware: Hardware, speed: Speed, scales: Iterable[int]) -> list[Scaling]:
    """Step time at each number of devices, every one of them with the same micro-batches (weak scaling)."""
    tokens = layout.micro_batch_size * layout.block_size * layout.accumulate
    compute = tokens / speed.tokens_per_second
    found = []
    for gpus in scales:
        at_scale = replace(layout, ranks=gpus)
        exchange, exposed = exposed_seconds(
            parameters, at_scale, hardware.links, hardware.gpus_per_node, compute * _BACKWARD
        )
        step = compute + exposed + _offload_seconds(parameters, at_scale, hardware)
        found.append(Scaling(gpus, step, exchange, tokens * gpus / step, compute / step))
    return found


_BACKWARD = 2 / 3
"""Of a step's computation: what gradients can be exchanged beside."""


def _offload_seconds(parameters: int, layout: Layout, hardware: Hardware) -> float:
    """fp32 gradients to the host, the optimiser's step there, weights back."""
    if not layout.offload:
        return 0.0
    share = parameters / layout.ranks
    moved = (4 + layout.weight_bytes) * share / PCIE_BYTES_PER_SECOND
    return moved + 28 * share * min(layout.ranks, hardware.gpus_per_node) / HOST_BYTES_PER_SECOND


@dataclass(frozen=True)
class Plan:
    """Everything that is expected of a run."""

    memory: MemoryEstimate
    """Of a device."""
    hardware: Hardware
    """Planned for."""
    speed: Speed
    """Assumed of one GPU."""
    expected: Scaling
    """Of this job."""
    tokens: int
    """Of the whole run."""
    steps: int
    """Of the optimiser."""
    checkpoints: int
    """On disk at once."""

    @property
    def hours(self) -> float:
        """From the first step to the last."""
        return self.steps * self.expected.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """Of all GPUs."""
        return self.hours * self.hardware.gpus

    @property
    def energy_kwh(self) -> float:
        """GPUs at the power of their boards, the rest of the nodes, the building."""
        return self.gpu_hours * self.hardware.gpu.watts / 1000 * (1 + HOST_POWER) * PUE

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Llama(self.memory.config).state_dict().items()}
        return checkpoint_bytes(shapes)

    @property
    def host_bytes(self) -> int:
        """Of one node."""
        return host_memory_bytes(self.memory.parameters, self.memory.layout, self.hardware.gpus_per_node)

    def exchanged(self) -> list[dict[str, Any]]:
        """What one device sends in a step."""
        ranks = self.hardware.gpus
        return [
            {"what": one.what, "collective": one.collective, "times": one.times, "bytes": sent_bytes(one, ranks)}
            for one in exchanges(self.memory.parameters, self.memory.layout)
        ]

    def by_stage(self) -> dict[str, list[Scaling]]:
        """Scaling of the same run at each ZeRO stage."""
        names = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
        layout = replace(self.memory.layout, offload=False)
        parameters = self.memory.parameters
        return {
            name: scaling(parameters, replace(layout, stage=stage), self.hardware, self.speed, SCALES)
            for stage, name in names.items()
        }

    def assumptions(self) -> list[str]:
        """Everything that was not counted but taken for granted."""
        links, gpu = self.hardware.links, self.hardware.gpu
        return [
            f"speed of one GPU: {self.speed.source}",
            f"{self.hardware.name}: {gpu.memory_gib:g} GiB, {gpu.watts:g} W, NVLink {gpu.nvlink_gbps:g} Gbit/s and "
            f"network {gpu.network_gbps:g} Gbit/s a GPU and direction",
            f"collectives get {links.achieved:.0%} of those rates, {links.nvlink_seconds * 1e6:g} us a hop in a node, "
            f"{links.network_seconds * 1e6:g} us between nodes",
            f"exchanges of gradients hide behind {links.hidden:.0%} of the backward pass (2/3 of the computation)",
            "device memory beside tensors: 2 GiB (CUDA, NCCL, libraries), and 5 % lost to fragmentation",
            "host memory: 4 GiB a rank, its copy of a checkpoint (12 bytes a parameter / ranks), what is offloaded",
            f"energy: GPUs at full board power, {HOST_POWER:.0%} more for the rest of a node, PUE {PUE:g}",
            "no time for validation, checkpoints, start-up, failures or waiting for data",
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, in bytes, seconds, tokens and kWh."""
        layout = self.memory.layout
        each = self.expected.tokens_per_second / self.hardware.gpus
        return {
            "layout": asdict(layout),
            "hardware": {**asdict(self.hardware), "gpu": self.hardware.gpu._asdict()},
            "memory": {**self.memory.to_dict(), "host_bytes_per_node": self.host_bytes},
            "speed": asdict(self.speed),
            "expected": {**asdict(self.expected), "tokens_per_second_per_device": each},
            "exchanged_per_step": self.exchanged(),
            "run": {
                "tokens": self.tokens,
                "steps": self.steps,
                "days": self.hours / 24,
                "gpu_hours": self.gpu_hours,
                "energy_kwh": self.energy_kwh,
                "checkpoint_bytes": self.checkpoint_bytes,
                "checkpoints": self.checkpoints,
                "disk_bytes": self.checkpoints * self.checkpoint_bytes,
            },
            "scaling": {name: [asdict(one) for one in stage] for name, stage in self.by_stage().items()},
            "assumptions": self.assumptions(),
        }


def make_plan(
    config: ModelConfig,
    layout: Layout,
    hardware: Hardware,
    speed: Speed,
    *,
    steps: int | None = None,
    tokens: float | None = None,
    checkpoints: int = 1,
) -> Plan:
    """Put it all together.

    Args:
        config: architecture with its vocabulary.
        layout: of as many ranks as ``hardware`` has GPUs.
        hardware: the machine.
        speed: of one of its GPUs.
        steps: of the run; or
        tokens: of the run, from which the steps follow.
        checkpoints: on disk at once.

    Raises:
        UserError: neither steps nor tokens.
    """
    per_step = layout.micro_batch_size * layout.block_size * layout.accumulate * layout.ranks
    if tokens is not None:
        steps = -(-int(tokens) // per_step)
    if steps is None or steps < 1:
        raise UserError("how long is the run? Give --trainer.max_steps N or --tokens N")
    memory = training_memory(config, layout)
    (expected,) = scaling(memory.parameters, layout, hardware, speed, [hardware.gpus])
    return Plan(memory, hardware, speed, expected, steps * per_step, steps, checkpoints)
