"""FLOPs against a counter that sees every matrix product, and device peaks against the makers' figures."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llmstack.accounting import (
    count_parameters,
    device_peak_flops,
    model_flops_per_token,
    model_flops_utilisation,
)
from llmstack.model import Llama, ModelConfig
from llmstack.training.step import micro_batch_loss


def added_product(_: Any, a: torch.Size, b: torch.Size, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_palm_flops_are_those_of_the_matrix_products_that_really_run(kv_heads: int, tied: bool) -> None:
    """The formula also counts the norms' parameters; grouped heads and an untied head are counted right."""
    config = ModelConfig(vocab_size=500, num_kv_heads=kv_heads, tie_word_embeddings=tied)
    model = Llama(config)
    ids = torch.randint(0, 500, (2, 65))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous(), "valid_tokens": 128}
    # PyTorch's counter does not know the product that adds in place, which makes the head's gradient.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product})
    # The plain kernel: the fused ones compute the scores a second time in the backward pass.
    with sdpa_kernel(SDPBackend.MATH), counter:
        micro_batch_loss(model, batch)[0].backward()
    norms = count_parameters(config).norms
    assert counter.get_total_flops() == 128 * (model_flops_per_token(config, 64, "palm") - 6 * norms)


def test_flops_and_utilisation_of_palm_540b_are_the_published_ones() -> None:
    """arXiv 2204.02311, appendix B: 238,300 tokens/s on 6144 TPU v4 of 275 TFLOP/s are an MFU of 46.2 %."""
    flops = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    assert flops * 238_300 / 6144 / 275e12 == pytest.approx(0.462, abs=5e-4)
    # The attention term of our formula, at PaLM's shape.
    wide = ModelConfig(vocab_size=8, hidden_size=8, num_layers=118, num_heads=48, head_dim=256, intermediate_size=8)
    palm, causal = (model_flops_per_token(wide, 2048, convention) for convention in ("palm", "causal"))
    assert 2 * (palm - causal) == 12 * 118 * 48 * 256 * 2048


def test_utilisation_is_the_part_of_the_peak_and_none_without_one() -> None:
    flops = model_flops_per_token(ModelConfig.preset("374m"), 1024, "palm")
    used = model_flops_utilisation(100_000 * flops, "NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert used == pytest.approx(100_000 * 2.449e9 / 989.4e12, rel=1e-3)
    assert model_flops_utilisation(100_000 * flops, "AMD EPYC 9654", torch.bfloat16) is None
    assert model_flops_utilisation(100_000 * flops, "Tesla V100-SXM2-32GB", torch.bfloat16) is None


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("Tesla V100-SXM2-32GB", None, 125, 15.7),
        ("NVIDIA A100-SXM4-80GB", 312, 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 312, 19.5),
        ("NVIDIA A10G", 70, 70, 35),
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 756, 51.2),
        ("NVIDIA H100 NVL", 835.5, 835.5, 60),
        ("NVIDIA H200", 989.4, 989.4, 66.9),
        ("NVIDIA B200", 2250, 2250, 75),
        ("NVIDIA L4", 121, 121, 30.3),
        ("NVIDIA L40S", 362, 362, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6),
        ("AMD Instinct MI250X", 191.5, 191.5, 47.9),
        ("AMD Instinct MI300X", 1307.4, 1307.4, 163.4),
    ],
)
def test_dense_peaks_are_the_datasheets(name: str, bf16: float | None, fp16: float, fp32: float) -> None:
    for dtype, tera in ((torch.bfloat16, bf16), (torch.float16, fp16), (torch.float32, fp32)):
        assert device_peak_flops(name, dtype) == (None if tera is None else pytest.approx(tera * 1e12))


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40",
        "NVIDIA A10",
        "NVIDIA H100",
    ],
)
def test_a_device_of_another_name_has_no_peak(name: str) -> None:
    assert device_peak_flops(name, torch.bfloat16) is None


def test_fp32_is_tf32_where_that_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert device_peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
        assert device_peak_flops("AMD Instinct MI300X", torch.float32) == pytest.approx(163.4e12)
    finally:
        torch.set_float32_matmul_precision(before)
