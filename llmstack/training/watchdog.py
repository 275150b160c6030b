"""A rank that dies or hangs ends the whole job within a bound, and is named."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

INTERVAL = 1.0
"""Seconds between two reports of a rank."""

LONGEST_TICK = 2.0
"""Seconds that the clock of a rank goes forward at most at once; more means that this process itself stood still."""

GRACE = 5.0
"""Seconds that the other ranks have, when one has failed, to come to the same error by themselves and say so."""


@dataclass
class _Report:
    """What a rank says of itself."""

    number: int
    """Counts the reports: one that does not change any more is one of a dead rank."""
    host: str
    pid: int
    state: str
    """``running``, ``done``, or the error that it failed with."""
    beats: int
    """Signs of progress so far; the ranks do the same things, so one with fewer is behind."""
    doing: str
    idle: float
    """Seconds since the newest of them."""


class Watchdog:
    """Watches the ranks of a job from threads beside the training, whatever backend the training talks through.

    Every rank reports once a second to a small key-value store of its own at rank 0. Rank 0 reads all reports, the
    others read rank 0's. A rank is **dead** when nothing came from it for ``dead_seconds`` (rank 0 also when its
    connection breaks), **hanging** when its main thread called :meth:`beat` last more than ``hang_seconds`` ago, and
    **failed** when it left with an exception. Then rank 0 prints one line that names it, a hanging rank its Python
    stacks, and all end with status 1 through ``os._exit``: a main thread inside a collective can do nothing itself.

    The reports come from a Python thread. It runs while the main thread compiles, loads or waits for a device, which
    release Python's global lock, but a C extension that keeps the lock stalls it: ``dead_seconds`` must be more than
    any such call takes, and ``hang_seconds`` more than the longest time between two beats (the first step compiles).
    Call :meth:`beat` at the same places on every rank, before a wait for others as well as after: where all stand
    still, because all wait for one, the one with the fewest beats is named.

    The time is counted by a thread, too, so it stops with the process: a job that was suspended and goes on, or a rank
    that could not look for a while, sees nobody dead.

    With one rank nothing is opened and ``broadcast`` is not called; a hang still ends the process, since a job that
    stands still for ever costs as much with one device.

    :meth:`stop` where all ranks end, whether they are finished or agreed to stop, and :meth:`fail` where this one alone
    does: a rank that just goes away is taken for dead.

    Args:
        rank: of this process.
        world_size: number of ranks.
        host: where rank 0 runs, as all ranks can reach it.
        broadcast: takes rank 0's value to all ranks (the others give None).
        hang_seconds: seconds without progress that are a hang.
        dead_seconds: seconds without any report that are a death.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        broadcast: Callable[[Any], Any],
        hang_seconds: float,
        dead_seconds: float = 30.0,
    ) -> None:
        self.rank, self.world_size, self.host, self.broadcast = rank, world_size, host, broadcast
        self.hang_seconds, self.dead_seconds = hang_seconds, dead_seconds
        self._store: dist.TCPStore | None = None
        self._state, self._number, self._published = "running", 0, ""
        self._clock = 0.0
        self._progress = (0, "start", self._clock)
        self._reports: list[_Report | None] = [None] * world_size
        self._seen = [self._clock] * world_size
        self._verdict = ""
        self._lost = False
        self._wake, self._closed = threading.Event(), threading.Event()
        # Two threads, since a call to the store of a stopped process may never return.
        self._threads = [
            threading.Thread(target=target, name=f"watchdog-{target.__name__}", daemon=True)
            for target in (self._report, self._judge)
        ]

    def start(self) -> None:
        """Begin to watch. All ranks call it: the port of the store is broadcast."""
        self.beat("start")
        timeout = timedelta(seconds=self.dead_seconds)
        if self.world_size > 1 and self.rank == 0:
            self._store = dist.TCPStore(self.host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            for key in ("verdict", *map(_key, range(self.world_size))):
                self._store.set(key, "")
            self._exchange()  # before the others come, so that they know from the start who rank 0 is
            self.broadcast(self._store.port)
        elif self.world_size > 1:
            port = self.broadcast(None)
            self._store = dist.TCPStore(self.host, port, timeout=timeout, wait_for_workers=False)
            self._exchange()
        for thread in self._threads:
            thread.start()

    def beat(self, what: str) -> None:
        """The main thread has come to ``what`` (``step 12``, ``saving step 25``). Costs next to nothing."""
        self._progress = (self._progress[0] + 1, what, self._clock)

    def stop(self) -> None:
        """This rank has come to its end. Rank 0, whose store the others need, stays until all have."""
        if self._closed.is_set():
            return
        self._leave("done")
        while self.rank == 0 and not all(report and report.state == "done" for report in self._reports):
            time.sleep(0.1)
        self._close()

    def fail(self, error: BaseException) -> None:
        """This rank ends with ``error``; the others are told and end too.

        Where the error only says that another rank could not be reached, that one is waited for to be named, at most
        until it must have been found dead; it ends this process then.
        """
        if self._closed.is_set():
            return
        if self.world_size > 1 and _comes_from_another_rank(error):
            self.beat(f"waiting to learn what became of the others ({_summary(error)})")
            self._closed.wait(self.dead_seconds + GRACE + 5 * INTERVAL)
        self._leave(_summary(error))
        if self.rank == 0 and self.world_size > 1:
            time.sleep(2 * INTERVAL)
        self._close()

    def _leave(self, state: str) -> None:
        """Change the state, and wait until the others can read it, or cannot any more."""
        self._state = state
        self._wake.set()
        until = time.monotonic() + self.dead_seconds
        while self._published != state and not self._lost and time.monotonic() < until:
            time.sleep(0.02)

    def _close(self) -> None:
        self._closed.set()
        self._wake.set()

    # The thread that talks to the store.

    def _report(self) -> None:
        while not self._closed.is_set():
            try:
                self._exchange()
            except dist.DistStoreError:
                pass  # No answer in time: how long is too long, the other thread knows.
            except RuntimeError:  # the connection is broken
                self._lost = True
                return
            self._wake.wait(INTERVAL)
            self._wake.clear()

    def _exchange(self) -> None:
        self._number += 1
        state, (beats, doing, moved) = self._state, self._progress
        own = _Report(self._number, socket.gethostname(), os.getpid(), state, beats, doing, self._clock - moved)
        if self._store is None:
            self._note(0, own)
        else:
            self._store.set(_key(self.rank), json.dumps(asdict(own)))
            if self.rank == 0:
                self._store.set("verdict", self._verdict)
            ranks = range(self.world_size) if self.rank == 0 else [0]
            *texts, verdict = self._store.multi_get([*map(_key, ranks), "verdict"])
            for rank, text in zip(ranks, texts, strict=True):
                if text:
                    self._note(rank, _Report(**json.loads(text)))
            if self.rank:
                self._verdict = verdict.decode()
        self._published = state

    def _note(self, rank: int, report: _Report) -> None:
        before = self._reports[rank]
        if before is None or before.number != report.number:
            self._seen[rank] = self._clock
            self._reports[rank] = report

    # The thread that counts the time and judges what was reported. It never waits for anything else.

    def _judge(self) -> None:
        failed_since: float | None = None
        ticked = time.monotonic()
        while not self._closed.wait(INTERVAL / 2):
            before, ticked = ticked, time.monotonic()
            self._clock += min(ticked - before, LONGEST_TICK)
            if self._lost or any(report and report.state not in ("running", "done") for report in self._reports):
                failed_since = self._clock if failed_since is None else failed_since
            in_grace = failed_since is not None and self._clock - failed_since < GRACE
            if self.rank == 0:
                self._verdict = self._verdict or self._find_fault(in_grace)
            if self._verdict:
                self._end(json.loads(self._verdict))
            elif self.rank and not in_grace and (self._lost or self._silence(0) > self.dead_seconds):
                self._end({"ranks": [0], "text": self._describe_end(0), "hang": False})

    def _find_fault(self, in_grace: bool) -> str:
        """What is wrong, as JSON for all; empty: nothing."""
        for rank, report in enumerate(self._reports):
            alive = report is None or report.state == "running"
            failed = report is not None and report.state not in ("running", "done")
            if (alive and self._silence(rank) > self.dead_seconds) or (failed and not in_grace):
                return json.dumps({"ranks": [rank], "text": self._describe_end(rank), "hang": False})
        running = {rank: report for rank, report in enumerate(self._reports) if report and report.state == "running"}
        if in_grace or any(self._silence(rank) > 3 * INTERVAL for rank in running):
            return ""  # one is failing, or dying perhaps: no wonder if others stand still
        idle = {rank: report.idle for rank, report in running.items()}
        if not idle or max(idle.values()) <= self.hang_seconds:
            return ""
        # Those who wait for the one that hangs reach the bound moments after it: it is the one that has done least.
        still = [rank for rank, seconds in idle.items() if seconds > self.hang_seconds - 3 * INTERVAL]
        fewest = min(running[rank].beats for rank in still)
        first, *others = [rank for rank in still if running[rank].beats == fewest]
        more = f" (and so do the {len(others)} others that have come as far)" if others else ""
        text = f"{self._name(first)} hangs: no progress for {idle[first]:.0f} s, since '{running[first].doing}'{more}"
        return json.dumps({"ranks": [first, *others], "text": text, "hang": True})

    def _silence(self, rank: int) -> float:
        return self._clock - self._seen[rank]

    def _name(self, rank: int) -> str:
        report = self._reports[rank]
        return f"rank {rank}" + (f" ({report.host}, process {report.pid})" if report else " (never heard of)")

    def _describe_end(self, rank: int) -> str:
        report = self._reports[rank]
        if report is None:
            return f"{self._name(rank)} died: no sign of life for {self._silence(rank):.0f} s"
        last = f"the last it reported, {report.idle + self._silence(rank):.0f} s ago: '{report.doing}'"
        if report.state in ("running", "done"):
            return f"{self._name(rank)} died: no sign of life for {self._silence(rank):.0f} s; {last}"
        return f"{self._name(rank)} failed with {report.state}; {last}"

    def _end(self, verdict: dict[str, Any]) -> None:
        """Say why and end this process. Straight to the descriptor: the main thread may hold the lock of ``stderr``."""
        if self.rank == 0 or verdict["ranks"] == [0]:
            os.write(2, f"llmstack: {verdict['text']}; rank {self.rank} ends the job\n".encode())
        if verdict["hang"] and self.rank in verdict["ranks"]:
            os.write(2, f"llmstack: rank {self.rank} stands here:\n".encode())
            faulthandler.dump_traceback(2, all_threads=True)
        if self.rank == 0 and self.world_size > 1:
            time.sleep(3 * INTERVAL)  # the store must last until all have read the verdict
        os._exit(1)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _summary(error: BaseException) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"[:300]


def _comes_from_another_rank(error: BaseException) -> bool:
    """Whether a collective failed for what became of its peer. Gloo raises plain RuntimeErrors, known by their text."""
    if isinstance(error, dist.DistError):
        return True
    marks = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)
