"""A lock on a folder that belongs to one process and dies with it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path

from llmstack.errors import UserError

LOCK_FILE = ".lock"

_logger = logging.getLogger(__name__)


class FolderLock:
    """An exclusive ``flock`` on ``folder/.lock``, held until ``release`` or the end of this process, however it ends.

    The kernel ties such a lock to the open file, which forked children share: a data worker that outlives its killed
    parent would keep the run locked. So a fork closes its copy at once; ``exec`` does by itself.

    Raises:
        UserError: another process holds it; the message has its number and host.
    """

    _descriptor = -1

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(f"cannot lock {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(os.pread(self._descriptor, 4096, 0))
            self.release()
            raise UserError(
                f"{folder} is in use by {holder}; wait for it, stop it, or choose another run.dir"
            ) from None
        except OSError as error:
            _logger.warning(
                "%s: this file system has no locks (%s); make sure that no second process uses the folder",
                folder,
                error.strerror,
            )
        _held.add(self)
        self._sign()

    def release(self) -> None:
        """Give the lock back; the file stays, since removing it would let two processes in."""
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = release

    def _sign(self) -> None:
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine holds the folder's lock.

    Trying to take it would, for that moment, keep a run from starting: the kernel's list is read instead.
    """
    try:
        inode = (folder / LOCK_FILE).stat().st_ino
        held = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in held.splitlines())


def _describe(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
