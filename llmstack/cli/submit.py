"""``llmstack submit``: check a run, write its batch script into its folder, and submit it."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import Parser, positive
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.cluster.script import Shape
    from llmstack.cluster.site import Site
    from llmstack.cluster.submission import Planned
    from llmstack.cluster.sweep import Point
    from llmstack.model import ModelConfig

SUMMARY = "check a run, write its Slurm script, submit it"

GPU_RANK_CPUS, CPU_RANK_CPUS = 8, 1
"""CPUs of a rank where neither command nor site file say: to feed a GPU, and to be the device."""

SAVING_BYTES_PER_SECOND = 5e8
"""Assumed of a shared file system that is busy."""

LAST_STEP_SECONDS = 60
"""For the step in progress, and what may follow it."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of what is not configuration."""
    parser = Parser(
        prog="llmstack submit",
        description="Everything that `llmstack fit` takes (-c FILE, --dotted.override VALUE), and how to run it under "
        "Slurm. The run is checked first; its script goes to RUN/slurm/ and stands alone.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes (default: 1)")
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--gpus-per-node", type=positive, metavar="G", help="GPUs of each node, one rank each")
    devices.add_argument("--cpu-ranks-per-node", type=positive, metavar="R", help="ranks on each node, on its CPUs")
    parser.add_argument("--time", required=True, metavar="T", help="time limit, as 24:00:00 or 2-12")
    parser.add_argument(
        "--cpus-per-task", type=positive, metavar="C", help="CPUs of a rank (default: the site's share)"
    )
    parser.add_argument("--mem", metavar="M", help="memory of each node, as 64G; 0: all (default: by the model)")
    parser.add_argument(
        "--min-nodes", type=positive, metavar="M", help="go on with so few if others are lost (default: all)"
    )
    parser.add_argument(
        "--signal-seconds", type=positive, metavar="S", help="seconds before the end to save at (default: by the model)"
    )
    parser.add_argument("--name", metavar="NAME", help="of the job (default: that of the run folder)")
    parser.add_argument(
        "--site", metavar="FILE", help="the cluster (default: $LLMSTACK_SITE, or ~/.config/llmstack/site.yaml)"
    )
    parser.add_argument("--sweep", metavar="FILE", help="a run for each point of this grid, as one array job")
    parser.add_argument("--at-once", type=positive, metavar="K", help="points that run together (default: all)")
    parser.add_argument(
        "--evaluate", action="append", default=[], metavar="FILE", help="then perplexity over this text, and a report"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print the scripts; write and submit nothing")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Submit; the numbers of the jobs go to stdout."""
    own, configured = build_parser().parse_known_args(arguments)
    from llmstack.cli.configured import HOW_IT_RUNS
    from llmstack.cluster import submission
    from llmstack.cluster.script import check_script
    from llmstack.cluster.site import Site
    from llmstack.cluster.sweep import read_sweep

    if own.at_once is not None and own.sweep is None:
        raise UserError("--at-once is how many points of a --sweep run together; there is no sweep here")
    _check_evaluations(own.evaluate)
    site = Site.read(own.site)
    points = read_sweep(own.sweep) if own.sweep else None
    shape, root, runs, accumulate = _checked(own, configured, site, points)
    for run in runs:
        submission.refuse_other(run, HOW_IT_RUNS)
    scripts = _scripts(own, shape, root, site, accumulate, points)
    for script in scripts.values():
        check_script(script)
    if own.dry_run:
        print("\n".join(scripts.values()), end="")
        return 0
    for job in submission.submit(root, runs, points, scripts):
        print(job)
    print(f"submitted; where it stands: llmstack status {shlex.quote(str(root))}", file=sys.stderr)
    return 0


def _scripts(
    own: argparse.Namespace, shape: Shape, root: Path, site: Site, accumulate: int, points: list[Point] | None
) -> dict[str, str]:
    """The text of each script by the name of its file, in the order of their jobs."""
    from dataclasses import replace

    from llmstack.cluster import submission
    from llmstack.cluster.script import evaluation_script, fit_script

    name, quoted = own.name or root.name, shlex.quote(str(root))
    whole = place = submission.place_of(root, quoted, f"{root}/logs/slurm-%j.out")
    array = None
    if points is not None:
        array = f"0-{len(points) - 1}" + (f"%{own.at_once}" if own.at_once else "")
        run = f'{quoted}/$(printf %04d "$SLURM_ARRAY_TASK_ID")'
        place = submission.place_of(root, run, f"{root}/%4a/logs/slurm-%A_%a.out")
    scripts = {submission.FIT_SCRIPT: fit_script(name, shape, site, place, accumulate, array)}
    if own.evaluate:
        alone = replace(shape, nodes=1, tasks=1, min_nodes=None)
        scripts[submission.EVALUATION_SCRIPT] = evaluation_script(
            f"{name}-evaluation", alone, site, whole, points is not None, own.evaluate
        )
    return scripts


def _check_evaluations(files: list[str]) -> None:
    from llmstack.cluster.script import slug

    for file in files:
        if not Path(file).is_file():
            raise UserError(f"--evaluate {file}: there is no such file")
    names = [slug(Path(file).name) for file in files]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--evaluate: the results of two files would both be called {name}; rename one")


def _check_options(arguments: Sequence[str], where: str, forbidden: Sequence[str]) -> None:
    for argument in arguments:
        if (option := argument.partition("=")[0]) in forbidden:
            raise UserError(f"{where}: {option} is not for it: {', '.join(forbidden)} come from submit itself")


_OWN_DEVICES = ("--trainer.devices", "--trainer.num_nodes", "--trainer.accelerator")
"""Of the configuration, decided by --nodes and --gpus-per-node."""


_OF_THE_WHOLE = ("--run.dir", "--help", "-h", "--print_config")


def _checked(
    own: argparse.Namespace, configured: list[str], site: Site, points: list[Point] | None
) -> tuple[Shape, Path, list[Planned], int]:
    """What Slurm is asked for, the folder of the run or sweep, its runs, and the micro-batches a step accumulates.

    Raises:
        UserError: whatever would stop a run before its first step.
    """
    from llmstack.checkpoint import RunFolder
    from llmstack.cli.configured import configuration, parse
    from llmstack.cluster.submission import Planned
    from llmstack.training.run import check, require_room

    shape = _shape(own, site)
    _check_options(configured, "the command", _OWN_DEVICES)
    for one in points or []:
        _check_options(one.arguments, f"{own.sweep}, point {one}", (*_OWN_DEVICES, *_OF_THE_WHOLE))
    # The devices are those of the nodes: here, where there may be none, CPU ranks stand for them.
    devices = (f"devices={shape.tasks}", f"num_nodes={shape.nodes}")
    stand_in = [f"--trainer.{one}" for one in ("accelerator=cpu", *devices)]
    root: Path | None = None
    runs, shapes = [], []
    accumulations = set()
    single: list[Point | None] = [None]
    for point in points or single:
        try:
            cli, names = parse("submit", [*configured, *(point.arguments if point else []), *stand_in])
            check(cli.trainer, cli.model, cli.datamodule, cli.config_init["run"])
        except UserError as error:
            raise (UserError(f"{own.sweep}, point {point}: {error}") if point else error) from error
        config = cli.config_init["run"]
        accumulations.add(cli.trainer.accumulate_grad_batches)
        if root is None:
            name = Path(own.sweep).stem if own.sweep else "-".join(names) or "default"
            root = Path(config.dir or f"runs/{name}").expanduser().absolute()
            if any(sign in str(root) for sign in '%\\"\n'):
                raise UserError(f"run.dir {root}: Slurm reads %, \\, quotation marks and line breaks in its own way")
        values = configuration(cli)
        values["trainer"] |= {"accelerator": "gpu" if shape.gpus else "cpu", "devices": shape.tasks}
        path = root / point.name if point else root
        require_room(cli.model.config, RunFolder(path), config, cli.trainer.max_steps)
        shapes.append(_sized(shape, own, site, cli.model.config, values))
        runs.append(Planned(path, values))
    assert root is not None
    if shape.min_nodes is not None and len(accumulations) > 1:
        raise UserError("--min-nodes needs the same trainer.accumulate_grad_batches in all points of a sweep")
    # The points of a sweep are tasks of one job: it asks for what the largest needs.
    largest = max(shapes, key=lambda one: (int(one.memory.rstrip("KMGT")), one.lead))
    return largest, root, runs, cli.trainer.accumulate_grad_batches


def _shape(own: argparse.Namespace, site: Site) -> Shape:
    from llmstack.cluster.script import SHORTEST_LEAD, Shape

    tasks = own.gpus_per_node or own.cpu_ranks_per_node
    share = site.cpus_per_node // tasks if site.cpus_per_node else None
    if share == 0:
        raise UserError(f"{tasks} ranks on a node that has {site.cpus_per_node} CPUs (cpus_per_node in the site file)")
    usual = GPU_RANK_CPUS if own.gpus_per_node else CPU_RANK_CPUS
    return Shape(
        nodes=own.nodes,
        tasks=tasks,
        gpus=own.gpus_per_node is not None,
        cpus=own.cpus_per_task or share or usual,
        memory=own.mem or site.memory_per_node or "0",
        time=own.time,
        lead=own.signal_seconds or SHORTEST_LEAD,
        min_nodes=own.min_nodes,
    )


def _sized(shape: Shape, own: argparse.Namespace, site: Site, model: ModelConfig, values: dict[str, Any]) -> Shape:
    """The shape with the memory that the run needs and the time that it needs to save.

    Raises:
        UserError: the site's GPUs cannot hold the run.
    """
    from dataclasses import replace

    from llmstack.accounting import count_parameters, find_gpu, host_memory_bytes, require_fit, training_memory
    from llmstack.cli.plan import layout_of
    from llmstack.cluster.script import SHORTEST_LEAD

    layout = layout_of(values, shape.nodes * shape.tasks)
    parameters = count_parameters(model).total
    memory = host_memory_bytes(parameters, layout, shape.tasks)
    if not shape.gpus:
        memory += shape.tasks * training_memory(model, layout).total
    elif site.gpu is not None:
        require_fit(training_memory(model, layout), int(find_gpu(site.gpu).memory_gib * 2**30), site.gpu)
    else:
        print(
            "whether the GPUs can hold the run is not checked: the site file does not say what they are",
            file=sys.stderr,
        )
    saving = LAST_STEP_SECONDS + 12 * parameters / SAVING_BYTES_PER_SECOND
    return replace(
        shape,
        memory=own.mem or site.memory_per_node or f"{-(-memory // 2**30)}G",
        lead=own.signal_seconds or max(SHORTEST_LEAD, 30 * math.ceil(saving / 30)),
    )
