"""``llmstack plan``: memory, speed, time, energy and disk of a run, before it is paid for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import Parser, output_file, positive

if TYPE_CHECKING:
    from llmstack.accounting import Hardware, Layout, Plan, Speed
    from llmstack.model import ModelConfig

SUMMARY = "memory, speed, time and energy of a run before it is started"


def main(arguments: Sequence[str]) -> int:
    """Print the plan.

    Returns:
        0: the run fits its devices.
    """
    import json

    from llmstack.accounting import make_plan, require_fit
    from llmstack.checkpoint.files import write_atomically
    from llmstack.cli.configured import described

    own = _own_options()
    options, rest = own.parse_known_args(arguments)
    if {"-h", "--help"} & set(rest):
        print(own.format_help(), "and the options of the configuration:\n", flush=True)
    values = described("plan", rest)
    hardware = _hardware(options)
    config, layout = _model(values), layout_of(values, hardware.gpus)
    speed = _speed(options, config, layout, hardware)
    print("counting what the model keeps for its backward pass ...", file=sys.stderr, flush=True)
    steps = values["trainer"]["max_steps"]
    plan = make_plan(
        config,
        layout,
        hardware,
        speed,
        steps=steps if steps and steps > 0 else None,
        tokens=options.tokens,
        checkpoints=_checkpoints(values["run"], steps),
    )
    require_fit(plan.memory, hardware.memory_bytes, hardware.name)
    print(as_text(plan))
    if options.output is not None:
        write_atomically(options.output, json.dumps(plan.to_dict(), indent=2) + "\n")
    return 0


def _own_options() -> argparse.ArgumentParser:
    own = Parser(prog="llmstack plan", add_help=False, allow_abbrev=False)
    own.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes of the job (default: %(default)s)")
    own.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="G", help="GPUs of each (default: %(default)s)"
    )
    own.add_argument(
        "--gpu", default="H100 80GB HBM3", metavar="NAME", help="as PyTorch names it (default: %(default)s)"
    )
    own.add_argument("--gpu-memory-gib", type=_above_zero, metavar="X", help="memory of one (default: the GPU's)")
    own.add_argument(
        "--nvlink-gbps",
        type=_above_zero,
        metavar="X",
        help="Gbit/s of one GPU within its node, in one direction; 3600 is NVLink of 450 GB/s (default: the GPU's)",
    )
    own.add_argument(
        "--network-gbps",
        type=_above_zero,
        metavar="X",
        help="Gbit/s of one GPU to other nodes, in one direction (default: that of its maker's own systems)",
    )
    own.add_argument("--watts", type=_above_zero, metavar="X", help="power of one GPU (default: the GPU's maximum)")
    speed = own.add_mutually_exclusive_group()
    speed.add_argument(
        "--efficiency",
        type=_share,
        default=0.4,
        metavar="X",
        help="share of the peak that one GPU gets before it has to talk to others: MFU by PaLM's convention "
        "(default: %(default)s)",
    )
    speed.add_argument(
        "--bench",
        metavar="FILE",
        help="instead of it a measured tokens_per_second_per_device: a run's metrics.csv (its median), or JSON",
    )
    own.add_argument(
        "--tokens", type=_above_zero, metavar="N", help="tokens of the run, as 20e9 (default: trainer.max_steps)"
    )
    own.add_argument("--output", type=output_file, metavar="F.json", help="write the plan there as JSON, too")
    return own


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _above_zero(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: it must be a number above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be above 0 and at most 1")
    return value


def _hardware(options: argparse.Namespace) -> Hardware:
    from llmstack.accounting import Gpu, Hardware, find_gpu

    given = {
        "memory_gib": options.gpu_memory_gib,
        "nvlink_gbps": options.nvlink_gbps,
        "network_gbps": options.network_gbps,
        "watts": options.watts,
    }
    # A GPU that the table lacks can be described whole.
    gpu = Gpu(**given) if None not in given.values() else find_gpu(options.gpu)
    gpu = gpu._replace(**{name: value for name, value in given.items() if value is not None})
    return Hardware(options.gpu, gpu, options.nodes, options.gpus_per_node)


def _model(values: dict[str, Any]) -> ModelConfig:
    from llmstack.errors import UserError
    from llmstack.model import ModelConfig

    config = ModelConfig.from_dict(values["model"]["config"])
    if config.vocab_size is None:
        raise UserError(
            "the vocabulary of this model is its tokenizer's, which a plan does not read: give "
            "--model.config.vocab_size N"
        )
    if values["data"]["block_size"] > config.max_position_embeddings:
        raise UserError(
            f"data.block_size {values['data']['block_size']} is longer than model.config.max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    return config


def layout_of(values: dict[str, Any], ranks: int) -> Layout:
    """How a complete configuration spreads a model over so many devices.

    Raises:
        UserError: it does not say how they share the work.
    """
    from llmstack.accounting import GATHERED_ELEMENTS, Layout
    from llmstack.errors import UserError
    from llmstack.training.strategies import BUCKET, read_settings

    strategy = values["trainer"]["strategy"]
    sharded: dict[str, Any] = {}
    if isinstance(strategy, dict) and strategy["class_path"].endswith(".Zero"):
        sharded = strategy["init_args"]
    elif not isinstance(strategy, dict) and ranks > 1:
        raise UserError(
            f"the plan is for {ranks} GPUs, but does not say how they share the work: add -c trainer/ddp.yaml, "
            "zero1.yaml, zero2.yaml, zero3.yaml or zero3_offload.yaml"
        )
    settings = read_settings(sharded.get("config")).get("zero_optimization", {})
    return Layout(
        stage=sharded.get("stage", 0),
        ranks=ranks,
        offload=sharded.get("offload", False),
        micro_batch_size=values["data"]["micro_batch_size"],
        block_size=values["data"]["block_size"],
        accumulate=values["trainer"]["accumulate_grad_batches"],
        precision=str(values["trainer"]["precision"] or "32-true"),
        activation_checkpointing=values["model"]["activation_checkpointing"],
        compile=values["model"]["compile"],
        bucket_elements=int(settings.get("reduce_bucket_size", BUCKET)),
        gathered_elements=int(settings.get("stage3_max_live_parameters", GATHERED_ELEMENTS)),
    )


def _speed(options: argparse.Namespace, config: ModelConfig, layout: Layout, hardware: Hardware) -> Speed:
    from pathlib import Path

    from llmstack.accounting import measured_speed, stated_speed

    if options.bench is not None:
        return measured_speed(Path(options.bench))
    return stated_speed(config, layout, hardware.name, options.efficiency)


def _checkpoints(run: dict[str, Any], steps: int | None) -> int:
    from llmstack.training.rhythm import RunConfig

    return RunConfig(**run).checkpoints_on_disk(steps or 0)


def as_text(plan: Plan) -> str:
    """Tables of at most 120 columns."""
    memory, layout, hardware, expected = plan.memory, plan.memory.layout, plan.hardware, plan.expected
    how = f"ZeRO-{layout.stage}" if layout.stage else "DDP" if layout.ranks > 1 else "one device"
    how += " with offload" if layout.offload else ""
    lines = [
        f"{memory.parameters:,} parameters, {how}, {layout.precision}, {hardware.nodes} x {hardware.gpus_per_node} "
        f"{hardware.name}",
        f"{layout.micro_batch_size} x {layout.block_size} tokens a micro-batch x {layout.accumulate} x {layout.ranks} "
        f"= {plan.tokens // plan.steps:,} tokens a step; activation checkpointing {layout.activation_checkpointing}, "
        f"{'compiled' if layout.compile else 'eager'}",
        "",
        "memory of a GPU, GiB" + "".join(f"{name:>12}" for name in memory.moments),
    ]
    terms = [moment.to_dict() for moment in memory.moments.values()]
    for term in terms[0]:
        if any(moment[term] for moment in terms):
            lines.append(f"  {term:<18}" + "".join(f"{moment[term] / 2**30:12.2f}" for moment in terms))
    lines += [
        f"  peak {memory.total / 2**30:.1f} of {hardware.gpu.memory_gib:g} GiB ({memory.peak_moment}); host memory "
        f"{plan.host_bytes / 2**30:.0f} GiB a node",
        "",
        "exchanged by a GPU in a step",
        *(
            f"  {one['what']}, {one['collective'].replace('_', '-')} x {one['times']}: {one['bytes'] / 1e9:.2f} GB"
            for one in plan.exchanged()
        ),
        "",
        f"{expected.step_seconds:.3f} s a step (exchanges {expected.exchange_seconds:.3f} s, hidden or not), "
        f"{expected.tokens_per_second:,.0f} tokens/s, {expected.tokens_per_second / hardware.gpus:,.0f} a GPU, scaling "
        f"efficiency {expected.efficiency:.1%}",
        f"{plan.steps:,} steps, {plan.tokens:,} tokens: {plan.hours / 24:.2f} days, {plan.gpu_hours:,.0f} GPU-hours, "
        f"{plan.energy_kwh:,.0f} kWh",
        f"disk: {plan.checkpoints} checkpoints of {plan.checkpoint_bytes / 1e9:.1f} GB = "
        f"{plan.checkpoints * plan.checkpoint_bytes / 1e9:.0f} GB",
        "",
        "scaling efficiency, %, by GPUs (same micro-batches on each)",
    ]
    stages = plan.by_stage()
    scales = [one.gpus for one in next(iter(stages.values()))]
    lines.append("  " + f"{'':<8}" + "".join(f"{gpus:>8}" for gpus in scales))
    lines += [f"  {name:<8}" + "".join(f"{100 * one.efficiency:8.1f}" for one in each) for name, each in stages.items()]
    return "\n".join([*lines, "", "assumed", *(f"  {line}" for line in plan.assumptions())])
