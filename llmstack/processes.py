"""Processes that belong to another one."""

import ctypes
import os
import signal
import sys


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies; on Linux only.

    So a process killed by SIGKILL leaves no orphans.

    Args:
        parent_pid: process that started this one, as it told by other means (the environment): it may have died, and
            been replaced as parent, before this call.
    """
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_stopping_to_parent(worker: int = 0) -> None:
    """Have a data worker (number ``worker``) ignore the signals that ask its parent to stop.

    Ctrl-C and schedulers signal every process of a job, and a training that saves needs its workers. They end when
    they are told to, or notice that the parent is gone.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
