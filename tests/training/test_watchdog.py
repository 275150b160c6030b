"""Ranks that are really killed, stopped or asleep, seen from the ranks that are left."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmstack.training.watchdog import GRACE

RANK = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from llmstack.training.watchdog import Watchdog

rank, world_size, folder, hang, dead, last_step = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6])
if world_size > 1:
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=world_size)

def broadcast(value):
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]

def at(what):
    print(what, flush=True)
    watchdog.beat(what)

def misfortune(step):
    order = f"{folder}/rank-{rank}-at-{step}"
    if os.path.exists(order):
        exec(open(order).read(), globals())

watchdog = Watchdog(rank, world_size, "127.0.0.1", broadcast, float(hang), float(dead))
watchdog.start()
try:
    for step in range(1, last_step + 1):
        at(f"step {step}")
        misfortune(step)
        at(f"exchange {step}")
        if world_size > 1:
            dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
except BaseException as error:
    watchdog.fail(error)
    raise
misfortune("end")
watchdog.stop()
"""

HANG, DEAD = 5.0, 4.0
BOUND = 25.0
"""Seconds from the misfortune to the end of all: the larger of the two, the grace, and the slowness of two cores."""

FOREVER = 100_000


def also_in_full(*values: int) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


class Job:
    """The ranks of one job, each a process."""

    def __init__(self, folder: Path, world_size: int, last_step: int, hang: float, dead: float) -> None:
        self.folder = folder
        rest = [str(world_size), str(folder), str(hang), str(dead), str(last_step)]
        self.output = [(folder / f"out-{rank}", folder / f"err-{rank}") for rank in range(world_size)]
        self.ranks = []
        for rank, (out, err) in enumerate(self.output):
            with out.open("w") as stdout, err.open("w") as stderr:
                command = [sys.executable, "-c", RANK, str(rank), *rest]
                self.ranks.append(subprocess.Popen(command, stdout=stdout, stderr=stderr))

    def wait_until(self, rank: int, has_said: str) -> None:
        until = time.monotonic() + 90
        while f"{has_said}\n" not in self.output[rank][0].read_text():
            assert time.monotonic() < until, self.errors(rank)
            time.sleep(0.02)

    def errors(self, rank: int) -> str:
        return self.output[rank][1].read_text()

    def end(self, bound: float, *ranks: int) -> list[int]:
        until = time.monotonic() + bound
        return [self.ranks[rank].wait(max(until - time.monotonic(), 0)) for rank in ranks or range(len(self.ranks))]


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(world_size, **{"1-at-20": code})`` starts a job in which rank 1 does ``code`` at step 20."""
    jobs: list[Job] = []

    def run(world_size: int, last_step: int = FOREVER, hang: float = HANG, dead: float = DEAD, **orders: str) -> Job:
        for place, code in orders.items():
            (tmp_path / f"rank-{place}").write_text(code)
        jobs.append(Job(tmp_path, world_size, last_step, hang, dead))
        return jobs[-1]

    yield run
    for job in jobs:
        for process in job.ranks:
            process.kill()
            process.wait(timeout=10)


def named(job: Job, speaker: int, rank: int, what: str) -> str:
    """The one line of ``speaker`` that names ``rank``."""
    lines = [line for line in job.errors(speaker).splitlines() if line.startswith("llmstack: rank")]
    named = [line for line in lines if line.startswith(f"llmstack: rank {rank} (") and what in line]
    assert len(named) == 1, job.errors(speaker)
    assert f"process {job.ranks[rank].pid})" in named[0]
    return named[0]


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (2, 0), also_in_full(3, 1)])
def test_a_killed_rank_is_named_and_ends_the_others(start: Start, world_size: int, victim: int) -> None:
    """Gloo tells its peers at once, but not who it was: they wait for that to be found."""
    job = start(world_size)
    job.wait_until(victim, "step 10")
    job.ranks[victim].kill()
    others = [rank for rank in range(world_size) if rank != victim]
    assert job.end(BOUND, *others) == [1] * len(others)
    assert "s ago: '" in named(job, others[0], victim, "died")


@pytest.mark.parametrize("victim", [0, also_in_full(1)])
def test_a_stopped_rank_is_named_and_ends_the_others(start: Start, victim: int) -> None:
    """SIGSTOP keeps all connections open: a process on a machine that is gone looks so."""
    job = start(2)
    job.wait_until(victim, "step 10")
    job.ranks[victim].send_signal(signal.SIGSTOP)
    assert job.end(BOUND, 1 - victim) == [1]
    named(job, 1 - victim, victim, "died: no sign of life for")
    job.ranks[victim].send_signal(signal.SIGCONT)
    assert job.end(BOUND, victim) == [1]


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), also_in_full(2, 0), also_in_full(3, 2)])
def test_a_rank_that_hangs_is_named_and_shows_where(start: Start, world_size: int, victim: int) -> None:
    """All stand still, since the others wait for it; it is the one named, with the line it stands in."""
    job = start(world_size, **{f"{victim}-at-20": "def stuck(): time.sleep(1000)\nstuck()"})
    job.wait_until(victim, "step 20")
    assert job.end(BOUND) == [1] * world_size
    line = named(job, 0, victim, "hangs: no progress for")
    assert "since 'step 20'" in line
    assert "others" not in line
    assert "in stuck" in job.errors(victim)
    assert not any("stands here" in job.errors(rank) for rank in range(world_size) if rank != victim)


def test_one_process_alone_ends_when_it_hangs(start: Start) -> None:
    job = start(1, **{"0-at-3": "time.sleep(1000)"})
    assert job.end(90) == [1]
    named(job, 0, 0, "hangs: no progress for")


def test_a_rank_that_fails_is_named_with_its_error(start: Start) -> None:
    job = start(2, **{"1-at-20": "raise ValueError('no such luck')"})
    job.wait_until(1, "step 20")
    assert job.end(BOUND) == [1, 1]
    assert "'step 20'" in named(job, 0, 1, "failed with ValueError: no such luck")


@pytest.mark.full
def test_ranks_that_fail_alike_each_keep_their_own_error_and_status(start: Start) -> None:
    """Such as wrong input that every rank finds: no rank is to blame."""
    code = "watchdog.fail(SystemExit('bad input'))\nos._exit(2)"
    job = start(3, **{f"{rank}-at-5": f"time.sleep({rank})\n{code}" for rank in range(3)})
    assert job.end(90) == [2, 2, 2]
    assert "llmstack: rank" not in "".join(job.errors(rank) for rank in range(3))


@pytest.mark.parametrize("last", [1, also_in_full(0)])
def test_ranks_that_end_at_different_times_end_well(start: Start, last: int) -> None:
    """More than ``dead_seconds`` and ``hang_seconds`` apart, whichever is first; the last works on meanwhile."""
    wait = "for _ in range(35):\n    time.sleep(0.2)\n    watchdog.beat('writing')"
    job = start(2, last_step=20, **{f"{last}-at-end": wait})
    assert job.end(90) == [0, 0]
    assert "llmstack: rank" not in job.errors(0) + job.errors(1)


@pytest.mark.full
def test_a_job_that_was_suspended_goes_on(start: Start) -> None:
    """As Slurm suspends one for another: every rank stands still for longer than either bound, rank 0 the longest."""
    job = start(2)
    job.wait_until(0, "step 10")
    for process in job.ranks:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * max(HANG, DEAD))
    job.ranks[1].send_signal(signal.SIGCONT)
    time.sleep(0.5)
    job.ranks[0].send_signal(signal.SIGCONT)
    reached = job.output[1][0].read_text().count("step")
    time.sleep(HANG + GRACE + 1)
    assert [process.poll() for process in job.ranks] == [None, None], job.errors(0) + job.errors(1)
    assert job.output[1][0].read_text().count("step") > reached + 10


@pytest.mark.full
def test_a_rank_that_dies_after_the_others_have_ended_well_is_named(start: Start) -> None:
    job = start(2, last_step=20, **{"1-at-end": "time.sleep(3)\nos.kill(os.getpid(), 9)"})
    assert job.end(90) == [1, -signal.SIGKILL]
    assert "'exchange 20'" in named(job, 0, 1, "died: no sign of life for")


CHILD = """
import sys, time
from llmstack.processes import end_with_parent
end_with_parent(int(sys.argv[1]))
print("running", flush=True)
time.sleep(1000)
"""

PARENT = """
import os, subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())]).pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can tie a process to its parent")
def test_a_rank_dies_with_the_killed_process_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "running\n"
    parent.kill()
    parent.wait(timeout=10)
    until = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < until, "an orphan lives on"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can tie a process to its parent")
def test_a_rank_whose_parent_was_dead_before_it_looked_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
