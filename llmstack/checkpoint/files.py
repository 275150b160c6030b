"""Writing so that a reader sees the old content or the new one, never a part, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmstack.errors import UserError


@contextmanager
def failing_in_one_line(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses (disk full, permission, …) into a UserError about ``path``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; check the disk space and the permissions there"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` in one step.

    Raises:
        UserError: the file cannot be written; the old content, if any, is still there.
    """
    partial = path.with_name(f".{path.name}.partial")
    with failing_in_one_line(path):
        try:
            with open(partial, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Wait until the content of ``path`` is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
