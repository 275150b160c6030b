"""What devices can do at most, by their makers' datasheets, and how much of it a model makes use of."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from llmstack.errors import UserError


class _Peak(NamedTuple):
    """Dense matrix TFLOP/s by type of the operands; None: the device lacks it."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float


_PEAKS = {
    r"V100-SXM[23]-(16|32)GB(-LS)?": _Peak(125, None, None, 15.7),
    r"V100-PCIE-(16|32)GB": _Peak(112, None, None, 14),
    r"V100S-PCIE-32GB": _Peak(130, None, None, 16.4),
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": _Peak(312, 312, 156, 19.5),
    r"A10G": _Peak(70, 70, 35, 35),
    r"H100 80GB HBM3": _Peak(989.4, 989.4, 494.7, 66.9),
    r"H100 PCIe": _Peak(756, 756, 378, 51.2),
    r"H100 NVL": _Peak(835.5, 835.5, 417.5, 60),
    r"H200": _Peak(989.4, 989.4, 494.7, 66.9),
    r"H200 NVL": _Peak(835.5, 835.5, 417.5, 60),
    r"B200": _Peak(2250, 2250, 1125, 75),
    r"L4": _Peak(121, 121, 60, 30.3),
    r"L40S": _Peak(362, 362, 183, 91.6),
    r"GeForce RTX 4090": _Peak(165.2, 165.2, 82.6, 82.6),
    r"AMD Instinct MI250X": _Peak(191.5, 191.5, None, 47.9),
    r"AMD Instinct MI300X( OAM)?": _Peak(1307.4, 1307.4, None, 163.4),
}


class Gpu(NamedTuple):
    """What a plan needs to know of a GPU beside its peak. Rates are of one GPU, in one direction."""

    memory_gib: float
    """What PyTorch reports as its memory, rounded down."""
    nvlink_gbps: float
    """Gbit/s to the other GPUs of its node: NVLink, or PCIe where it has none."""
    network_gbps: float
    """Gbit/s to other nodes: what its maker's own system (DGX, HGX) has for each GPU, or 25 where there is none."""
    watts: float
    """Most that its board draws."""


GPUS = {
    "V100-SXM2-32GB": Gpu(31.7, 1200, 100, 300),
    "A100-SXM4-40GB": Gpu(39.4, 2400, 200, 400),
    "A100-SXM4-80GB": Gpu(79.1, 2400, 200, 400),
    "A100 80GB PCIe": Gpu(79.1, 256, 25, 300),
    "A10G": Gpu(22.0, 256, 25, 300),
    "H100 80GB HBM3": Gpu(79.1, 3600, 400, 700),
    "H100 PCIe": Gpu(79.1, 512, 25, 350),
    "H200": Gpu(139.8, 3600, 400, 700),
    "B200": Gpu(178.0, 7200, 400, 1000),
    "L4": Gpu(22.0, 256, 25, 72),
    "L40S": Gpu(44.4, 256, 25, 350),
    "GeForce RTX 4090": Gpu(23.5, 256, 25, 450),
}
"""By their names as for :func:`device_peak_flops`; from the same datasheets and those of DGX-1V, DGX A100, H100, H200
and B200. NVLink: half of the total that sheets add up over both directions (H100: 900 GB/s -> 450 GB/s = 3600 Gbit/s);
PCIe 4.0 x16: 256, 5.0: 512."""


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        UserError: it is not in the table; the message lists those that are.
    """
    gpu = GPUS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))
    if gpu is None:
        raise UserError(f"no GPU '{name}' (there are: {', '.join(GPUS)})")
    return gpu


def device_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense peak, in FLOP/s, of one device as PyTorch sees it; None where it is not known.

    Matrix products of ``dtype`` accumulated in fp32, without structured sparsity (which datasheets like to double
    figures with). fp32 means TF32 where ``torch.set_float32_matmul_precision`` allows it. Only whole names match: a
    CPU, a slice of a GPU (MIG), a laptop's part of the same name or a device not listed has no peak rather than a
    made-up one.

    Sources: NVIDIA's datasheets of V100, A100, H100 (SXM and NVL), H200, L4, L40S and HGX B200; the H100 architecture
    whitepaper (PCIe, fp32 of SXM); the A10G sheet published with AWS G5, half an A10's matrix rate; the Ada
    architecture whitepaper (RTX 4090: with fp32 accumulation, half the headline figure); AMD's datasheets of MI250X
    (383 TFLOP/s bf16 for its two dies, each of which is a device of its own) and MI300X.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        dtype: type that the matrix products are computed in.
    """
    name = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    peak = next((peak for pattern, peak in _PEAKS.items() if re.fullmatch(pattern, name)), None)
    if peak is None:
        return None
    full_precision = torch.get_float32_matmul_precision() == "highest" or peak.tf32 is None
    by_dtype = {
        torch.float16: peak.fp16,
        torch.bfloat16: peak.bf16,
        torch.float32: peak.fp32 if full_precision else peak.tf32,
    }
    tera = by_dtype.get(dtype)
    return None if tera is None else tera * 1e12


def model_flops_utilisation(flops_per_second: float, device_name: str, dtype: torch.dtype) -> float | None:
    """MFU: the part of a device's peak that the model's own FLOPs take up; None where the peak is unknown.

    Chowdhery et al., arXiv 2204.02311, appendix B. Activations that are computed again in the backward pass are not
    the model's FLOPs, so recomputation lowers the MFU (it would not lower the HFU, which counts what the hardware did).

    Args:
        flops_per_second: tokens of the whole job per second · :func:`model_flops_per_token` / number of devices; the
            convention of the latter is that of the result.
        device_name: as for :func:`device_peak_flops`.
        dtype: likewise.
    """
    peak = device_peak_flops(device_name, dtype)
    return None if peak is None else flops_per_second / peak
