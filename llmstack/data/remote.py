"""Prepared data in a store that fsspec reaches (s3://, gs://, memory://, …): sent there, and brought to a disk.

Training maps shards into memory, which only a disk can do: a set is copied into the cache once, by its identity, and
checked against its own checksums.
"""

from __future__ import annotations

import json
from pathlib import Path

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.data.prepared import INDEX, PreparedData, growing_folder
from llmstack.errors import UserError
from llmstack.store import bring, cache_root, is_remote, put, reaching


def local_folder(path: str | Path) -> Path:
    """The prepared folder on disk: ``path`` itself, or the copy in the cache of what lies at an address.

    Raises:
        UserError: the store cannot be reached, has no prepared data there, or what came is damaged.
    """
    if not is_remote(path):
        return Path(path)
    url = str(path)
    with reaching(url) as (store, root):
        if not store.exists(f"{root}/{INDEX}"):
            raise UserError(f"{url}: no prepared data there ({INDEX} is missing)")
        try:
            index = json.loads(store.cat_file(f"{root}/{INDEX}"))
            folder = cache_root() / f"remote-{index['identity'][:32]}"
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{url}/{INDEX}: damaged ({error}); send the data again") from error
        if not folder.exists():
            with failing_in_one_line(folder.parent), growing_folder(folder, index["identity"]) as growing:
                if growing is not None:
                    for name in sorted(found.removeprefix(f"{root}/") for found in store.find(root)):
                        target = growing / name
                        if not target.is_file() or target.stat().st_size != store.size(f"{root}/{name}"):
                            bring(store, f"{root}/{name}", target)
                    PreparedData(growing).verify()
    return folder


def send(folder: Path, url: str) -> None:
    """Put a prepared folder at an address; its index, which makes it one, last.

    Raises:
        UserError: the store cannot be reached, or holds other data there.
    """
    with reaching(url) as (store, root):
        if store.exists(f"{root}/{INDEX}"):
            there = json.loads(store.cat_file(f"{root}/{INDEX}"))["identity"]
            if there != PreparedData(folder).identity:
                raise UserError(f"{url}: holds other prepared data; give a new place")
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != INDEX)
        for path in [*files, folder / INDEX]:
            name = f"{root}/{path.relative_to(folder)}"
            if path.name == INDEX or not store.exists(name) or store.size(name) != path.stat().st_size:
                put(store, path, name)
