"""How many threads a batch call may use, and what must happen when a process forks.

``tokenizers`` keeps one thread pool for the process. A forked child inherits the pool's locks but not its threads, so
a batch call there waits for ever. The library guards against it only where TOKENIZERS_PARALLELISM is unset, and then
prints a warning at every fork. Here the variable is set once, and a forked child turns the pool off for itself.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import cache

_VARIABLE = "TOKENIZERS_PARALLELISM"


def batch_threads() -> int:
    """Threads for one batch call: one in a worker process (its siblings use the other cores), else all cores."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def make_fork_safe() -> None:
    """Let forked children of this process use ``tokenizers`` without its thread pool; call before its first use."""
    if multiprocessing.parent_process() is not None:
        os.environ[_VARIABLE] = "false"
    os.environ.setdefault(_VARIABLE, "true")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_without_thread_pool)


def _without_thread_pool() -> None:
    os.environ[_VARIABLE] = "false"
