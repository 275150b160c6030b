"""Being asked to stop: a signal sets a flag, from the first moment of a process on; whoever works looks at it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llmstack.errors import UserError

STOP_SIGNAL = "LLMSTACK_STOP_SIGNAL"
"""Variable with the name of the signal by which a scheduler announces the end; USR1 where it is not set."""


class StopSignals:
    """Notes the signals that ask this process to stop. Whoever works looks at ``received`` where stopping is safe.

    The scheduler's signal is noted from the start: by default it would kill a process that still loads its libraries.
    Schedulers send it to every process of a job, and it would kill compilers and data workers just as well. So it is
    ignored and blocked, which all threads and programs that are started later inherit (some unblock signals), and one
    thread waits for it: Linux keeps a blocked signal for it although it is ignored.

    SIGTERM and Ctrl-C are noted while training; before, they end the process at once (nothing is lost then), except
    under Slurm, where a SIGTERM announces the end like the other. A second one ends the process at once, again except
    under Slurm: there the same signal may come by several ways, and SIGKILL follows anyhow.

    Handlers that someone else has set are called, too.

    Raises:
        UserError: ``LLMSTACK_STOP_SIGNAL`` is not the name of a signal.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The last one."""
        self.speaks = not any(os.environ.get(rank, "0") != "0" for rank in ("SLURM_PROCID", "RANK", "LOCAL_RANK"))
        """Whether this process says what it has received: the first of all ranks."""
        self.announcing = _named(os.environ.get(STOP_SIGNAL, "USR1"))
        """The scheduler's."""
        self._under_slurm = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" in os.environ
        self._owner = os.getpid()
        self._others: dict[int, Any] = {}

    @contextmanager
    def from_start(self) -> Iterator[None]:
        """Note the scheduler's signals inside the context; to be entered before anything heavy is loaded."""
        handler = signal.getsignal(self.announcing)
        if not callable(handler):
            signal.signal(self.announcing, signal.SIG_IGN)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {self.announcing})
        done = threading.Event()
        taker = threading.Thread(target=self._take, args=(done,), name="signals", daemon=True)
        taker.start()
        try:
            with self._noting([signal.SIGTERM] if self._under_slurm else []):
                yield
        finally:
            done.set()
            signal.pthread_kill(taker.ident or 0, self.announcing)
            taker.join()
            # Where nobody else had a handler it stays ignored: there is nothing left to stop, and nothing to be killed.
            if callable(handler):
                signal.signal(self.announcing, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Note all signals that ask to stop: from before the first step to after the last checkpoint."""
        with self._noting([signal.SIGTERM, signal.SIGINT]):
            yield

    @contextmanager
    def _noting(self, signals: list[signal.Signals]) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in signals}
        for number, handler in before.items():
            if handler != self._note:
                self._others[number] = handler
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, done: threading.Event) -> None:
        """Wait for the scheduler's signal. A handler that someone has set for it, earlier or later, is called here."""
        while True:
            signal.sigwait({self.announcing})
            if done.is_set():
                return
            self._others[self.announcing] = signal.getsignal(self.announcing)
            self._note(self.announcing, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked worker: it ends when its parent does
            return
        is_known = self.received == number
        self.received = signal.Signals(number)
        ends_at_once = number != self.announcing and not self._under_slurm
        if ends_at_once:
            signal.signal(number, signal.SIG_DFL)
        if self.speaks and not is_known:
            more = " (once more: at once)" if ends_at_once else ""
            # Straight to the descriptor: the handler may have interrupted a print.
            os.write(2, f"{self.received.name}: stopping when the step is done{more}\n".encode())
        other: Callable[[int, FrameType | None], Any] | int | None = self._others.get(number)
        if callable(other) and other is not signal.default_int_handler:
            other(number, frame)


def _named(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise UserError(f"{STOP_SIGNAL} is {name}; it must name a signal, as USR1") from None
