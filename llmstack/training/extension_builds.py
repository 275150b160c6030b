"""Building DeepSpeed's operations so that a build that was killed holds nobody up afterwards.

DeepSpeed compiles an operation at its first use through ``torch.utils.cpp_extension``, in a folder that all of a user's
processes share, perhaps on several machines. Who builds holds a *baton*, a file ``lock`` in the operation's folder
that is made at the start and removed at the end; the others wait until it is gone and then import what is there. A
killed build leaves the baton, and everybody after it waits for ever.

So a process of ours builds an operation alone, under a ``flock`` of our own for each, which the kernel takes from a
process that dies, and signs it while it builds. Whoever gets the lock and finds the signature of another knows that
this one died, and that a baton younger than the signature was its own: it is cleared at once. Any other baton belongs
to a program that is not ours, perhaps alive on another machine, and is cleared only when nothing in its folder has
changed for :data:`LONGEST_BUILD`. Neither is cleared while a process of this machine still works in the folder: the
compilers of a build outlive a killed parent.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LONGEST_BUILD = 1800.0
"""Seconds without any change that no living build takes (the largest of DeepSpeed's files compile in minutes)."""

PATIENCE = 5.0
"""Seconds of waiting after which it is said for whom."""


@contextmanager
def building_extensions() -> Iterator[None]:
    """Inside, one process at a time builds an extension, and no baton of a dead build is in the way.

    Each call of ``torch.utils.cpp_extension.load`` is made so, and only that: ranks that exchange something between two
    builds do not wait for each other here. One such block inside another adds nothing.
    """
    from torch.utils import cpp_extension

    plain_load = cpp_extension.load
    if hasattr(plain_load, "__wrapped__"):
        yield
        return

    @functools.wraps(plain_load)
    def load(name: str, *arguments: Any, **options: Any) -> Any:
        root = extensions_folder()
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root, name) as died_at:
            _wait_for_the_baton(root, name, died_at)
            return plain_load(name, *arguments, **options)

    cpp_extension.load = load
    try:
        yield
    finally:
        cpp_extension.load = plain_load


def extensions_folder() -> Path:
    """Where PyTorch builds extensions: ``TORCH_EXTENSIONS_DIR``, or its cache."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def clear_stale_batons(root: Path, name: str, died_at: float | None) -> list[Path]:
    """Remove the batons of dead builds of an extension, and with each the libraries there.

    One may be half linked. Ninja, which has no record of its end, would link it again, but a program that is not ours
    and waits for this baton imports what it finds when that is gone.

    Args:
        root: see :func:`extensions_folder`.
        name: the extension; the caller alone builds it.
        died_at: when the process began that died while it alone built it; None: none did.

    Returns:
        the batons removed; a line names each.
    """
    cleared = [baton for baton in _batons(root, name) if _is_stale(baton, died_at)]
    for baton in cleared:
        for library in baton.parent.glob("*.so"):
            library.unlink()
        baton.unlink()
        _say(f"cleared {baton}, the lock of a build that was killed")
    return cleared


def _wait_for_the_baton(root: Path, name: str, died_at: float | None) -> None:
    said = False
    while True:
        clear_stale_batons(root, name, died_at)
        held = _batons(root, name)
        if not held:
            return
        if not said:
            _say(f"waiting for {_describe(held[0])}")
            said = True
        time.sleep(0.5)


def _is_stale(baton: Path, died_at: float | None) -> bool:
    try:
        ours = died_at is not None and baton.stat().st_mtime >= died_at
        changed = max(path.stat().st_mtime for path in baton.parent.iterdir())
    except FileNotFoundError:  # let go just now
        return False
    return (ours or time.time() - changed > LONGEST_BUILD) and not _processes_in(baton.parent)


def _describe(baton: Path) -> str:
    users = _processes_in(baton.parent)
    if users:
        return f"process {', '.join(map(str, users))}, which builds in {baton.parent}"
    return (
        f"whoever holds {baton}; it is cleared when {LONGEST_BUILD / 60:.0f} minutes have passed without a change there"
    )


def _batons(root: Path, name: str) -> list[Path]:
    """Below the cache lies a folder for each Python and accelerator, below TORCH_EXTENSIONS_DIR none."""
    return sorted([*root.glob(f"{name}/lock"), *root.glob(f"*/{name}/lock")])


def _processes_in(folder: Path) -> list[int]:
    """Processes of this machine that run in ``folder`` (compilers do) or have its baton open (who builds does)."""
    folder = folder.resolve()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            places = {os.readlink(link) for link in (process / "cwd", *(process / "fd").iterdir())}
        except OSError:  # gone, or another user's
            continue
        if places & {str(folder), str(folder / "lock")} and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@contextmanager
def _alone(root: Path, name: str) -> Iterator[float | None]:
    """Hold an extension. Gives the time at which the holder before signed, if it died with its signature there."""
    with open(root / f".llmstack-{name}.lock", "a+") as file:
        locked = _acquire(file, root / name)
        file.seek(0)
        died_at = os.fstat(file.fileno()).st_mtime if file.read() and locked else None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield died_at
        finally:
            file.truncate(0)


def _acquire(file: IO[str], built: Path) -> bool:
    """Wait for the lock; false where the file system has none."""
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not said and time.monotonic() - began > PATIENCE:
                file.seek(0)
                _say(f"waiting for {file.read() or 'another process'}, which builds {built}")
                said = True
            time.sleep(0.1)
        except OSError as error:
            place = f"{built.parent} has no locks ({error.strerror})"
            _say(f"{place}: start one process first where an operation is not built yet")
            return False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
