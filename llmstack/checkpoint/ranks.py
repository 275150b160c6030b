"""Several processes that write one checkpoint: all succeed, or all fail with one error, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.errors import UserError

Result = TypeVar("Result")


class Ranks(Protocol):
    """The processes that write together.

    ``gather`` is called by the thread that writes. Where that is a thread beside the training, it needs a process group
    of its own, or its messages would meet those of the training.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """``value`` (small, picklable) of every rank, in rank order, on every rank."""


class _Alone:
    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE: Ranks = _Alone()
"""One process."""


def on_every_rank(ranks: Ranks, folder: Path, work: Callable[[], Result]) -> list[Result]:
    """Do ``work``, which writes ``folder``, on each rank; what all of them returned, in rank order.

    Raises:
        UserError: of the first rank that failed; the same on every rank. A rank with an exception other than of the
            system or the user (a fault of the program, an interrupt) raises that one itself.
    """
    result: Result | None = None
    error: BaseException | None = None
    try:
        with failing_in_one_line(folder):
            result = work()
    except BaseException as raised:
        error = raised
    try:
        # Reached on every path: a rank that left without it would make the others wait.
        outcomes = ranks.gather((result, None if error is None else _described(error)))
        if error is not None and (ranks.world_size == 1 or not isinstance(error, UserError)):
            raise error
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise UserError(f"{failure} (rank {rank})") from error
        return [value for value, _ in outcomes]
    finally:
        # The traceback leads back to this frame: without this the tensors would live until the next collection.
        del error


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
