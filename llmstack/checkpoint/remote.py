"""Checkpoints in a store that fsspec reaches (s3://, gs://, …): a run's mirror, and checkpoints brought from there.

A mirror has the names of the run folder, `<address>/config.yaml`, `<address>/checkpoints/step-00000025/…`, and
`folder.txt`, that folder's own name. The manifest of a checkpoint is sent last and removed first, so that a folder
with a manifest is a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.checkpoint.format import MANIFEST, BrokenCheckpoint, checkpoint_step, read_checkpoint, receive_checkpoint
from llmstack.checkpoint.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    FINISHED_FILE,
    RunFolder,
    parse_config,
    refuse_other_config,
)
from llmstack.errors import UserError
from llmstack.store import bring, cache_root, put, reaching

FOLDER_FILE = "folder.txt"
"""Of a mirror: whose it is."""

_SMALL_FILES = ("metrics.csv", "diagnostics.csv", "environment.json")
"""What a run folder has beside configuration and checkpoints and could not make again."""

_logger = logging.getLogger(__name__)


class Mirror:
    """The copy of a run folder at an address.

    Every method raises :class:`UserError` where the store cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._damaged = set[str]()
        """Names of the checkpoints that came and did not verify: they are sent anew."""

    @property
    def is_finished(self) -> bool:
        """Whether the run there has ended, and all of it is there."""
        with reaching(self.url) as (store, root):
            return bool(store.exists(f"{root}/{FINISHED_FILE}"))

    def refuse_other_run(self, folder: str, config: Mapping[str, Any], free: Sequence[str]) -> None:
        """Raise a :class:`UserError` if the run there is not that of ``folder``, the run's own as it was given.

        Two runs of one configuration have folders of their own; one mirror for both would make them one. Nor may it
        differ from ``config`` in more than ``free`` keys.
        """
        with reaching(self.url) as (store, root):
            names = store.ls(root, detail=False) if store.exists(root) else []
            present = {name.rstrip("/").rsplit("/", 1)[1] for name in names}
            if CONFIG_FILE not in present:
                if present - {FOLDER_FILE}:
                    raise UserError(f"{self.url} holds something else than a run: choose another run.mirror")
                return
            there = parse_config(store.cat_file(f"{root}/{CONFIG_FILE}"), f"{self.url}/{CONFIG_FILE}")
            known = FOLDER_FILE in present
            other = store.cat_file(f"{root}/{FOLDER_FILE}").decode() if known else "of an unknown folder"
        if other != folder:
            raise UserError(
                f"{self.url} mirrors the run {other}, not {folder}: choose another run.mirror, or give --run.dir "
                f"{other} to continue that run"
            )
        # As it would be written and read.
        refuse_other_config(self.url, "run.mirror", there, yaml.safe_load(yaml.safe_dump(dict(config))), free)

    def restore(self, run: RunFolder) -> list[int]:
        """Bring what the folder of an unfinished run lacks, if the mirror is ahead; the steps of what came.

        A checkpoint that does not verify is left where it is, with a warning.
        """
        with reaching(self.url) as (store, root):
            there = _whole_checkpoints(store, f"{root}/{CHECKPOINTS}")
            here = {step for path in run.checkpoints() if (step := checkpoint_step(path)) is not None}
            if max(there, default=0) <= max(here, default=0):
                return []
            with failing_in_one_line(run.path):
                # Before the checkpoints: rows past the step that a run goes on from are cut, missing ones are not made.
                for name in _SMALL_FILES:
                    if store.exists(f"{root}/{name}"):
                        bring(store, f"{root}/{name}", run.path / name)
            came = []
            for step in sorted(set(there) - here):
                try:
                    _receive(store, there[step], run.checkpoint_path(step))
                    came.append(step)
                except BrokenCheckpoint as error:
                    self._damaged.add(run.checkpoint_path(step).name)
                    _logger.warning("broken checkpoint in %s, left there: %s", self.url, error)
            if not came and not here:
                raise UserError(
                    f"{self.url}: all {len(there)} checkpoints are broken; restore one, or give another run.mirror to "
                    "start again"
                )
            return came

    def send(self, run: RunFolder) -> None:
        """Make the mirror hold what the folder holds, and no other checkpoints."""
        with reaching(self.url) as (store, root):
            # Whose it is before what is in it.
            store.makedirs(root, exist_ok=True)
            store.pipe_file(f"{root}/{FOLDER_FILE}", str(run.path).encode())
            put(store, run.config_path, f"{root}/{CONFIG_FILE}")
            # Tables before checkpoints: of rows too many a run that comes back cuts some, rows too few it cannot make.
            for name in _SMALL_FILES:
                if (run.path / name).is_file():
                    put(store, run.path / name, f"{root}/{name}")
            here = {path.name: path for path in run.checkpoints()}
            for path in filter(_is_whole, here.values()):
                target = f"{root}/{CHECKPOINTS}/{path.name}"
                manifest = (path / MANIFEST).read_bytes()
                there = store.cat_file(f"{target}/{MANIFEST}") if store.exists(f"{target}/{MANIFEST}") else None
                if there != manifest or path.name in self._damaged:
                    _remove(store, target)
                    files = (file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)
                    for file in [*sorted(files), path / MANIFEST]:
                        put(store, file, f"{target}/{file.relative_to(path).as_posix()}")
                    self._damaged.discard(path.name)
            for target in _checkpoints(store, f"{root}/{CHECKPOINTS}").values():
                if target.rsplit("/", 1)[1] not in here:
                    _remove(store, target)
            if (run.path / FINISHED_FILE).is_file():
                put(store, run.path / FINISHED_FILE, f"{root}/{FINISHED_FILE}")


def local_checkpoint(url: str) -> Path:
    """The copy in the cache of the checkpoint at an address, or of the newest one of the run there.

    Raises:
        UserError: the store cannot be reached, has no checkpoint there, or what came is damaged.
    """
    with reaching(url) as (store, root):
        source = root
        if not store.exists(f"{root}/{MANIFEST}"):
            there = _whole_checkpoints(store, f"{root}/{CHECKPOINTS}")
            if not there:
                raise UserError(f"{url}: neither a checkpoint there ({MANIFEST}) nor a run with one ({CHECKPOINTS}/)")
            source = there[max(there)]
        identity = hashlib.sha256(store.cat_file(f"{source}/{MANIFEST}")).hexdigest()
        folder = cache_root() / f"checkpoint-{identity[:32]}" / source.rsplit("/", 1)[1]
        if not folder.exists():
            _receive(store, source, folder)
    return folder


def _checkpoints(store: Any, folder: str) -> dict[int, str]:
    """Path in the store of each checkpoint, by step, those without a manifest among them."""
    if not store.exists(folder):
        return {}
    found = {checkpoint_step(Path(path)): path.rstrip("/") for path in store.ls(folder, detail=False)}
    return {step: path for step, path in found.items() if step is not None}


def _whole_checkpoints(store: Any, folder: str) -> dict[int, str]:
    found = _checkpoints(store, folder)
    return {step: path for step, path in found.items() if store.exists(f"{path}/{MANIFEST}")}


def _is_whole(folder: Path) -> bool:
    """As far as its manifest says; it was written by this run, or verified when the run went on from it."""
    try:
        read_checkpoint(folder, verify=False)
    except UserError:
        return False
    return True


def _receive(store: Any, source: str, folder: Path) -> None:
    def fill(hidden: Path) -> None:
        for name in (path.removeprefix(f"{source}/") for path in store.find(source)):
            bring(store, f"{source}/{name}", hidden / name)

    receive_checkpoint(folder, fill)


def _remove(store: Any, folder: str) -> None:
    if store.exists(f"{folder}/{MANIFEST}"):
        store.rm_file(f"{folder}/{MANIFEST}")
    if store.exists(folder):
        store.rm(folder, recursive=True)
