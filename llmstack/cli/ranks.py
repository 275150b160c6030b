"""How the processes of a command that does not train find each other: those of ``torchrun``, or of an ``srun`` step."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from llmstack.errors import Stopped, UserError

if TYPE_CHECKING:
    from llmstack.ranks import Ranks

Result = TypeVar("Result")

_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_PATIENCE = timedelta(minutes=5)
"""With the last of the ranks to come."""

_LONGEST_SHARE = timedelta(days=1)
"""How long a rank may work while the others wait for it; one that dies is noticed at once."""


class Place(NamedTuple):
    """Of a process among those that work together."""

    address: str
    """Where they meet, a URL."""
    rank: int
    world_size: int
    local_rank: int
    """Its number on its node."""


def place() -> Place | None:
    """What ``torchrun`` or ``srun`` has told this process; None: it is alone."""
    if all(name in os.environ for name in _TORCHRUN):
        address, port, *numbers = (os.environ[name] for name in _TORCHRUN)
        rank, world_size, local_rank = map(int, numbers)
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        # Loads Lightning, for which others need not wait.
        from llmstack.training.launch import SlurmTasks

        step = SlurmTasks()
        address, port = step.main_address, str(step.main_port)
        rank, world_size, local_rank = step.global_rank(), step.world_size(), step.local_rank()
    else:
        return None
    return Place(f"tcp://{address}:{port}", rank, world_size, local_rank) if world_size > 1 else None


def join() -> Ranks:
    """The ranks that ``torchrun`` or ``srun`` has started, of which this process is one; else this process alone.

    Called once, by every rank, before any work. The process group is for small exchanges on the host (gloo); it ends
    with the process. Where there are GPUs, each rank's is chosen.

    Raises:
        UserError: the ranks do not find each other.
    """
    import torch
    import torch.distributed as dist

    from llmstack.ranks import Ranks

    ranks, mine = Ranks(), place()
    if mine is None:
        return ranks
    if torch.cuda.is_available():
        # A task may see its own GPU alone.
        torch.cuda.set_device(mine.local_rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            "gloo", init_method=mine.address, rank=mine.rank, world_size=mine.world_size, timeout=_PATIENCE
        )
        atexit.register(dist.destroy_process_group)
        ranks.connect(_LONGEST_SHARE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the {mine.world_size} ranks do not meet at {mine.address}: {reason}") from error
    return ranks


def together(ranks: Ranks, work: Callable[[], Result]) -> list[Result]:
    """Do ``work``, in which ranks exchange nothing, on each of them; what all returned (small, picklable), in order.

    Raises:
        Stopped: a rank failed; the same on every rank, so that one line says it. A fault of the program is raised by
            the rank that has it.
        UserError: of ``work``, where there is one process.
    """
    if ranks.world_size == 1:
        return [work()]
    result: Result | None = None
    failure: tuple[str, int] | None = None
    fault: Exception | None = None
    try:
        result = work()
    except UserError as error:
        failure = str(error), 2
    except Exception as error:
        failure, fault = (f"{type(error).__name__}: {error}", 1), error
    try:
        # Reached on every path: a rank that left without it would make the others wait.
        outcomes = ranks.gather((result, failure))
    except RuntimeError as error:
        raise Stopped("another rank has ended, or is half an hour behind: its own output says why", 1) from error
    if fault is not None:
        raise fault
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise Stopped(failed[0] if rank == 0 else f"rank {rank}: {failed[0]}", failed[1])
    return [value for value, _ in outcomes]
