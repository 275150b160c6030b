"""Exchanges, time and energy against figures worked out by hand and published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmstack.accounting import (
    Hardware,
    Layout,
    Links,
    Speed,
    exchanges,
    exposed_seconds,
    find_gpu,
    make_plan,
    measured_speed,
    scaling,
    sent_bytes,
    stated_speed,
)
from llmstack.checkpoint.metrics import COLUMNS
from llmstack.errors import UserError
from llmstack.model import ModelConfig

PARAMETERS = 10**9
H100 = Hardware("H100 80GB HBM3", find_gpu("NVIDIA H100 80GB HBM3"), nodes=2, gpus_per_node=8)


def test_ring_and_levels_by_hand() -> None:
    links = Links(nvlink_gbps=3600, network_gbps=400, achieved=1, nvlink_seconds=0, network_seconds=0)
    # 1 GB over 8 GPUs at 450 GB/s, 7/8 of it each way.
    assert links.seconds("reduce_scatter", 1e9, 8, 8) == pytest.approx(7 / 8 / 450)
    assert links.seconds("all_reduce", 1e9, 8, 8) == pytest.approx(2 * 7 / 8 / 450)
    # Then, over 4 nodes, 3/4 of an eighth of it at 50 GB/s.
    assert links.seconds("all_gather", 1e9, 32, 8) == pytest.approx(7 / 8 / 450 + 3 / 4 / 8 / 50)
    assert links.seconds("all_gather", 1e9, 1, 8) == 0
    late = Links(3600, 400, nvlink_seconds=1, network_seconds=100)
    assert late.seconds("all_gather", 0, 32, 8) == 7 + 3 * 100
    assert late.seconds("all_reduce", 0, 32, 8) == 2 * (7 + 2 * 100)


def test_volumes_are_those_of_the_zero_paper() -> None:
    """arXiv 1910.02054, section 7: 2Ψ elements a step without sharing, 3Ψ at stage 3 when nothing stays whole.

    Stages 1 and 2 would need 2Ψ; DeepSpeed all-reduces (2Ψ) where a reduce-scatter (Ψ) would do, and gathers (Ψ).
    """

    def elements(stage: int, **options: int) -> float:
        layout = Layout(stage, 2**40, **options)
        return sum(sent_bytes(one, 2**40) / one.bytes_each for one in exchanges(PARAMETERS, layout)) / PARAMETERS

    assert elements(0) == pytest.approx(2)
    assert elements(1) == pytest.approx(3)
    assert elements(2) == pytest.approx(3)
    assert elements(3, gathered_elements=0) == pytest.approx(3)
    assert elements(3) == pytest.approx(2)
    # Without whole gradients every micro-batch sends its own.
    assert elements(2, accumulate=4) == pytest.approx(4 * 2 + 1)
    assert elements(1, accumulate=4) == pytest.approx(3)
    assert exchanges(PARAMETERS, Layout(2, 1)) == []


def test_bytes_follow_the_precision() -> None:
    def sent(precision: str) -> list[float]:
        return [sent_bytes(one, 2) for one in exchanges(PARAMETERS, Layout(2, 2, precision=precision))]

    assert sent("bf16-mixed") == [4e9, 1e9]
    assert sent("32-true") == [4e9, 2e9]


def test_what_hides_costs_only_what_computation_does_not_cover() -> None:
    links = Links(3600, 400, achieved=1, nvlink_seconds=0, network_seconds=0, hidden=0.5)
    layout = Layout(0, 8, bucket_elements=PARAMETERS // 10)
    total, exposed = exposed_seconds(PARAMETERS, layout, links, 8, compute_seconds=0)
    assert total == exposed == pytest.approx(2 * 7 / 8 * 4 / 450)
    half = exposed_seconds(PARAMETERS, layout, links, 8, compute_seconds=total)[1]
    assert half == pytest.approx(total / 2)
    # The last of ten buckets has nothing to hide behind.
    assert exposed_seconds(PARAMETERS, layout, links, 8, compute_seconds=1e3)[1] == pytest.approx(total / 10)


def test_efficiency_falls_from_one() -> None:
    for stage in range(4):
        curve = scaling(PARAMETERS, Layout(stage, 1), H100, Speed(50_000, ""), (1, 2, 8, 16, 64, 1024))
        assert curve[0].efficiency == 1
        efficiencies = [one.efficiency for one in curve]
        assert efficiencies == sorted(efficiencies, reverse=True)
        assert all(one.tokens_per_second == pytest.approx(50_000 * one.gpus * one.efficiency) for one in curve)


def test_hours_of_1b_are_those_of_its_published_flops() -> None:
    """20e9 tokens of 1B are 1.56e20 FLOPs (PaLM): at 40 % of 989.4 TFLOP/s 110 hours of one H100."""
    config = ModelConfig.preset("1b")
    layout = Layout(0, 1, micro_batch_size=1, activation_checkpointing="full", compile=False)
    hardware = Hardware("H100 80GB HBM3", find_gpu("H100 80GB HBM3"), 1, 1)
    plain = stated_speed(config, Layout(), hardware.name, 0.4)
    plan = make_plan(config, layout, hardware, plain, tokens=20e9, checkpoints=5)
    assert plan.gpu_hours == pytest.approx(1.56e20 / (0.4 * 989.4e12) / 3600, rel=3e-3)
    assert plan.energy_kwh == pytest.approx(plan.gpu_hours * 0.7 * 1.4 * 1.2)
    assert plan.checkpoint_bytes == pytest.approx(12 * 1_235_814_400, rel=1e-4)
    # Each block's forward pass once more: a third more time.
    again = stated_speed(config, layout, hardware.name, 0.4)
    assert plain.tokens_per_second / again.tokens_per_second == pytest.approx(4 / 3)
    second = stated_speed(config, Layout(activation_checkpointing=2), hardware.name, 0.4)
    assert plain.tokens_per_second / second.tokens_per_second == pytest.approx(7 / 6)


def test_a_measured_speed_is_the_median_of_a_run_or_a_bench(tmp_path: Path) -> None:
    column = COLUMNS.index("tokens_per_second_per_device")
    rows = [["" for _ in COLUMNS] for _ in range(4)]
    for step, (row, value) in enumerate(zip(rows, ("", "100", "900", "300"), strict=True), start=1):
        row[0], row[column] = str(step), value
    run = tmp_path / "metrics.csv"
    run.write_text("\n".join(",".join(row) for row in [list(COLUMNS), *rows]) + "\n")
    assert measured_speed(run).tokens_per_second == 300
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"tokens_per_second_per_device": 1234}))
    assert measured_speed(bench).tokens_per_second == 1234
    bench.write_text("{}")
    with pytest.raises(UserError, match="no tokens_per_second_per_device"):
        measured_speed(bench)
    with pytest.raises(UserError, match="no such file"):
        measured_speed(tmp_path / "none.json")


def test_unknown_hardware_and_length_are_refused() -> None:
    with pytest.raises(UserError, match=r"no GPU .H1000. \(there are: .*H100 PCIe"):
        find_gpu("H1000")
    with pytest.raises(UserError, match="peak of Abacus"):
        stated_speed(ModelConfig.preset("1b"), Layout(), "Abacus", 0.4)
    with pytest.raises(UserError, match="how long is the run"):
        make_plan(ModelConfig.preset("1b"), Layout(), H100, Speed(1, ""))
