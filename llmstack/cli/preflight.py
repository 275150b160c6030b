"""``llmstack preflight``: under ``srun``, checks every node of a submitted run before it starts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register ``preflight``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "preflight",
        help="check the nodes of a submitted run (its script does)",
        description="One process per rank, as srun starts them: paths, versions, clocks, devices, and an exchange "
        "between all ranks. What is wrong is one line with node and remedy; status 2, or 1 if the job can do without "
        "the node.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of the submitted run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, together with the other ranks; the first says what was found good."""
    from llmstack.cluster.preflight import check_ranks, submitted_config
    from llmstack.training.launch import cluster_environment

    path = Path(args.run_folder)
    config = submitted_config(path)
    ranks = cluster_environment()
    world = ranks.world_size() if ranks.creates_processes_externally else 1
    devices = config["trainer"]["devices"]
    ranks.validate_settings(devices, max(world // devices, 1))
    rank, local = (ranks.global_rank(), ranks.local_rank()) if world > 1 else (0, 0)
    good = check_ranks(path, config, rank, world, local, (ranks.main_address, ranks.main_port))
    if rank == 0:
        print(good, file=sys.stderr)
    return 0
