"""Addresses that fsspec reaches (s3://, gs://, file://, memory://, …), and the cache on disk of what was brought."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmstack.errors import UserError


def cache_root() -> Path:
    """``$LLMSTACK_CACHE``, or ``~/.cache/llmstack/data``."""
    return Path(os.environ.get("LLMSTACK_CACHE") or "~/.cache/llmstack/data").expanduser()


def is_remote(path: str | Path) -> bool:
    """Whether ``path`` is an address and not a place on this machine's disks."""
    return "://" in str(path)


@contextmanager
def reaching(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of an address, and the path in it.

    Raises:
        UserError: no such address, or what happens inside the block shows that it cannot be reached.
    """
    import fsspec

    if not re.fullmatch(r"[\w+.-]+://.*[^/].*", url):
        raise UserError(f"{url}: an address without a place; give one as s3://bucket/name")
    try:
        store, root = fsspec.core.url_to_fs(url)
        # What others have written since must be seen.
        store.invalidate_cache()
        yield store, root.rstrip("/")
    except UserError:
        raise
    except Exception as error:  # the library of each kind of store has errors of its own
        raise UserError(
            f"{url}: cannot be reached ({str(error).splitlines()[0] if str(error) else error!r})"
        ) from error


def put(store: Any, source: Path, target: str) -> None:
    """Copy a file into a store."""
    store.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
    store.put_file(str(source), target)


def bring(store: Any, source: str, target: Path) -> None:
    """Copy a file from a store."""
    target.parent.mkdir(parents=True, exist_ok=True)
    store.get_file(source, str(target))
