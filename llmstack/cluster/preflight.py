"""Checks before a GPU-hour is spent: on each node, by as many ranks as the run has.

What is wrong is a line with the node and the remedy. A node with broken devices goes on a list in the run's folder, and
the job comes back without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmstack.checkpoint.environment import package_versions
from llmstack.checkpoint.run_folder import parse_config
from llmstack.cluster.record import SLURM_FOLDER, SUBMITTED_CONFIG
from llmstack.cluster.requeue import BAD_NODES
from llmstack.cluster.snapshot import PACKAGES
from llmstack.errors import Stopped, UserError

MEETING_SECONDS = 120.0
"""Ranks that have not come by then are missing."""

CLOCK_SECONDS = 5.0
"""Clocks further apart would disorder logs and checkpoints."""

FREE_SHARE = 0.9
"""Of a GPU's memory: less means that someone else is on it."""

BUFFER = 64 * 2**20
"""Bytes that each rank gives to the exchange whose speed is shown."""


@dataclass
class _Report:
    """What one rank has found."""

    node: str
    clock: float
    versions: dict[str, str]
    device: str
    faults: list[str] = field(default_factory=list)
    """Of the surroundings: someone has to mend them."""
    broken: list[str] = field(default_factory=list)
    """Of the node's devices: the job can do without the node."""


def submitted_config(path: Path) -> dict[str, Any]:
    """The configuration in the folder of a submitted run.

    Raises:
        UserError: this node does not see it, or it is no longer what was submitted.
    """
    file = path / SUBMITTED_CONFIG
    try:
        config = parse_config(file.read_bytes(), file)
    except OSError as error:
        raise UserError(
            f"node {node_name()}: cannot read {file} ({error.strerror}): this is not the folder that was submitted; "
            "choose a --run.dir that all nodes share"
        ) from error
    sections = [config.get(name) for name in ("trainer", "data", "model")]
    if not all(isinstance(one, dict) for one in sections) or not isinstance(config["trainer"].get("devices"), int):
        raise UserError(f"{file} is not what was submitted: submit the run again")
    return config


def node_name() -> str:
    """Of this process, as Slurm calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_ranks(path: Path, config: dict[str, Any], rank: int, world: int, local: int, meeting: tuple[str, int]) -> str:
    """Check this rank, meet the others, and compare. All ranks of the run call it.

    Args:
        path: folder of the run.
        config: complete configuration.
        rank: of this process.
        world: number of ranks.
        local: number of this rank on its node.
        meeting: address and port at rank 0.

    Returns:
        A line about what was found good.

    Raises:
        UserError: something that a submission with other values, or a mended environment, would put right.
        Stopped: nodes are broken; they are on the run's list of bad nodes.
    """
    gpus = config["trainer"]["accelerator"] == "gpu"
    report = _Report(node_name(), 0.0, package_versions(), _device(gpus, local))
    report.faults += [*_unseen(path, config), *_changed(path, report.versions)]
    report.broken += _unfit(gpus, local)
    store = _meet(rank, world, meeting, int(config["trainer"]["devices"]))
    report.clock = time.time()
    reports = [_Report(**one) for one in _exchange(store, rank, world, asdict(report))]
    faults = [f"node {one.node}: {fault}" for one in reports for fault in one.faults]
    faults += _differing([one for one in reports if not one.broken])
    broken = {one.node: one.broken for one in reports if one.broken}
    if broken and rank == 0:
        _note_bad_nodes(path, list(broken))
    if faults:
        raise UserError("; ".join(dict.fromkeys(faults)))
    if broken:
        shown = "; ".join(f"node {node}: {', '.join(dict.fromkeys(found))}" for node, found in broken.items())
        raise Stopped(f"{shown}; the job can go on without {', '.join(broken)}", status=1)
    bandwidth = _bandwidth(store, rank, world, gpus, local) if world > 1 else None
    nodes = len({one.node for one in reports})
    speed = "" if bandwidth is None else f"; all-reduce {bandwidth / 1e9:.2f} GB/s a rank"
    return f"{world} ranks on {nodes} nodes ({report.device}): paths, versions, clocks and devices are good{speed}"


def _device(gpus: bool, local: int) -> str:
    if gpus and torch.cuda.is_available() and local < torch.cuda.device_count():
        return torch.cuda.get_device_name(local)
    return "CPU"


def paths_of(config: dict[str, Any]) -> list[Path]:
    """Files and folders that a run reads."""
    data = config["data"]
    named: list[Any] = [data.get("folder"), data.get("tokenizer"), config["model"].get("init_from")]
    for several in (data.get("files"), data.get("heldout_files"), list(data.get("mixture") or [])):
        named += several if isinstance(several, list) else [several]
    # Addresses are reached when the data is opened; patterns and names of fetched sets are no paths.
    return [Path(one) for one in named if one and "://" not in one and not any(sign in one for sign in "*?[")]


def _unseen(path: Path, config: dict[str, Any]) -> Iterator[str]:
    for file in paths_of(config):
        if file.is_absolute() and not os.access(file, os.R_OK):
            yield f"{file} cannot be read; put it where all nodes see it, and give its path there"
    mark = path / SLURM_FOLDER / f".seen-by-{node_name()}-{os.getpid()}"
    try:
        mark.write_text(node_name())
        mark.unlink()
    except OSError as error:
        yield f"{path} cannot be written ({error.strerror}); choose a --run.dir on a file system that all nodes share"


def _changed(path: Path, versions: dict[str, str]) -> Iterator[str]:
    """What is no longer as it was when the run was submitted."""
    lines = (path / SLURM_FOLDER / PACKAGES).read_text(encoding="utf-8").split()
    then = dict(line.split("==", 1) for line in lines)
    for name, version in versions.items():
        before = then.get(name.replace("_", "-"), then.get(name))
        if before != version:
            yield f"{name} is {version}, and was {before} when the run was submitted: submit it again"


def _unfit(gpus: bool, local: int) -> Iterator[str]:
    """What is wrong with this rank's device."""
    if not gpus:
        return
    if not torch.cuda.is_available():
        yield "no GPU can be used (nvidia-smi there says why)"
        return
    if local >= torch.cuda.device_count():
        yield f"{torch.cuda.device_count()} GPUs, but rank {local} of the node needs one of its own"
        return
    try:
        free, total = torch.cuda.mem_get_info(local)
        if free < FREE_SHARE * total:
            yield f"GPU {local}: {(total - free) / 2**30:.0f} of {total / 2**30:.0f} GiB are taken by another process"
        ones = torch.ones(1024, 1024, device=f"cuda:{local}")
        if not bool((ones @ ones == 1024).all()):
            yield f"GPU {local} multiplies wrongly"
    except RuntimeError as error:
        yield f"GPU {local}: {str(error).splitlines()[0]}"
    if shutil.which("nvidia-smi"):
        yield from _memory_errors(local)


def _memory_errors(local: int) -> Iterator[str]:
    query = "--query-gpu=ecc.errors.uncorrected.volatile.total"
    uuid = str(torch.cuda.get_device_properties(local).uuid)
    command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", query, "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        counted = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
        if counted.isdigit() and int(counted):
            yield f"GPU {local} has {counted} uncorrected memory errors"


def _meet(rank: int, world: int, meeting: tuple[str, int], per_node: int) -> dist.Store:
    """A store that all ranks have come to.

    Raises:
        UserError: who is missing.
    """
    address, port = meeting
    timeout = timedelta(seconds=MEETING_SECONDS)
    try:
        store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        store.set(f"here/{rank}", node_name())
        until = time.monotonic() + MEETING_SECONDS
        while missing := [one for one in range(world) if not store.check([f"here/{one}"])]:
            if time.monotonic() > until:
                nodes = sorted({one // per_node for one in missing})
                shown = ", ".join(map(str, nodes))
                raise UserError(
                    f"ranks {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''} of the job's node(s) "
                    f"number {shown} have not come in {MEETING_SECONDS:.0f} s: see their logs, and whether they reach "
                    f"{address}:{port}"
                )
            time.sleep(0.2)
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"node {node_name()}: {address}:{port}, where the ranks meet, cannot be reached ({reason}); the nodes' "
            "network or the names of the nodes are at fault"
        ) from error
    return store


def _exchange(store: dist.Store, rank: int, world: int, value: Any) -> list[Any]:
    """What every rank gives; none leaves before all have it."""
    store.set(f"report/{rank}", json.dumps(value))
    found = [json.loads(store.get(f"report/{one}")) for one in range(world)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{one}" for one in range(world)])
    return found


def _differing(reports: Sequence[_Report]) -> Iterator[str]:
    for first, one in ((reports[0], one) for one in reports[1:]):
        other = {name: version for name, version in one.versions.items() if first.versions.get(name) != version}
        if other or one.versions.keys() != first.versions.keys():
            shown = ", ".join(f"{name} {version}" for name, version in sorted(other.items())[:3]) or "fewer packages"
            yield (f"node {one.node} has another environment than {first.node} ({shown}): use one that all nodes share")
        if one.device != first.device:
            yield f"node {one.node} has {one.device}, {first.node} has {first.device}: ask for one kind (--constraint)"
        # All have just met, so the clocks show the same moment up to the time that rank 0 took to see them.
        if abs(one.clock - first.clock) > CLOCK_SECONDS:
            yield f"node {one.node}: its clock is {one.clock - first.clock:+.0f} s off that of {first.node}; mend NTP"


def _bandwidth(store: dist.Store, rank: int, world: int, gpus: bool, local: int) -> float:
    """Bytes per second that each rank moves in an all-reduce: 2·(n−1)/n of the buffer, as in a ring."""
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        store=dist.PrefixStore("bandwidth", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    buffer = torch.ones(BUFFER // 4, device=device)
    taken = []
    try:
        for _ in range(4):
            buffer.fill_(1.0)
            dist.barrier(device_ids=[local] if gpus else None)
            began = time.perf_counter()
            dist.all_reduce(buffer)
            if gpus:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        if not bool((buffer == world).all()):
            raise UserError(
                f"node {node_name()}: an all-reduce of {world} ranks gave a wrong sum; its network is broken"
            )
    except RuntimeError as error:
        raise UserError(f"node {node_name()}: an all-reduce failed: {str(error).splitlines()[0]}") from error
    finally:
        dist.destroy_process_group()
    return 2 * (world - 1) / world * BUFFER / min(taken)


def _note_bad_nodes(path: Path, nodes: Sequence[str]) -> None:
    with open(path / SLURM_FOLDER / BAD_NODES, "a", encoding="utf-8") as file:
        file.write("".join(f"{node}\n" for node in nodes))
