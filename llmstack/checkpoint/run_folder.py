"""The folder of one training run: what lies in it, who may write it, and where to go on.

runs/<name>/
    config.yaml         complete configuration; written once, it is what identifies the run
    run.json            appears when the run has finished: {"finished_step": N}
    checkpoints/        step-00000025/, …
    metrics.csv         see metrics.py
    diagnostics.csv     see diagnostics.py
    environment.json    see environment.py
    logs/ plots/ tensorboard/
    .lock               held by the process that trains
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from llmstack.checkpoint.diagnostics import DiagnosticsFile
from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.checkpoint.format import (
    BrokenCheckpoint,
    Checkpoint,
    checkpoint_name,
    checkpoint_step,
    read_checkpoint,
    remove_checkpoint,
)
from llmstack.checkpoint.lock import LOCK_FILE, FolderLock
from llmstack.checkpoint.metrics import MetricsFile
from llmstack.errors import UserError
from llmstack.yaml_files import parse_yaml

Status = Literal["new", "resume", "finished"]

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
FINISHED_FILE = "run.json"

_BEFORE_CONFIG = {LOCK_FILE, "logs", "slurm", f".{CONFIG_FILE}.partial"}
"""What a folder may hold before a run has started in it: a start that was killed, a submitted job and its output."""
_SHOWN_DIFFERENCES = 6
_MISSING = object()
_logger = logging.getLogger(__name__)


class RunFolder:
    """A run folder. Made directly it only looks (for readers); ``open`` takes it for training."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.status: Status = self._find_status()
        """new; resume: begun and unfinished, with or without a checkpoint; finished."""
        self._lock: FolderLock | None = None
        self._broken: set[tuple[Path, int]] = set()

    @classmethod
    def open(cls, path: str | Path, config: Mapping[str, Any], free: Sequence[str] = ()) -> RunFolder:
        """Take the folder for a run of ``config`` (plain YAML values) and lock it until ``close`` or the process ends.

        Args:
            path: the folder.
            config: complete configuration.
            free: dotted keys that a run may be continued with other values of.

        Raises:
            UserError: it holds something else, a run of another configuration, or a run that is going on. In the first
                two cases nothing in it has been touched.
        """
        with failing_in_one_line(Path(path)):
            run = cls(path)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        run._refuse_other_content()
        run._refuse_other_config(yaml.safe_load(text), free)
        with failing_in_one_line(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        run._lock = FolderLock(run.path)
        try:
            # Another process may have begun here before the lock was ours.
            run._refuse_other_config(yaml.safe_load(text), free)
            run.status = run._find_status()
            if run.status == "new":
                write_atomically(run.config_path, text)
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def config_path(self) -> Path:
        """The complete configuration."""
        return self.path / CONFIG_FILE

    @property
    def checkpoints_path(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def environment_path(self) -> Path:
        """Where and with what each start ran."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> MetricsFile:
        """metrics.csv."""
        return MetricsFile(self.path / "metrics.csv")

    @property
    def diagnostics(self) -> DiagnosticsFile:
        """diagnostics.csv."""
        return DiagnosticsFile(self.path / "diagnostics.csv")

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run that is here.

        Raises:
            UserError: there is none, or it is no YAML mapping.
        """
        try:
            content = self.config_path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.config_path}: {error.strerror}") from error
        return parse_config(content, self.config_path)

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` optimiser steps belongs."""
        return self.checkpoints_path / checkpoint_name(step)

    def checkpoints(self) -> list[Path]:
        """All checkpoint folders, whether good or not, by step."""
        if not self.checkpoints_path.is_dir():
            return []
        found = {path: checkpoint_step(path) for path in self.checkpoints_path.iterdir() if path.is_dir()}
        return sorted((path for path, step in found.items() if step is not None), key=lambda path: found[path] or 0)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None; each broken one on the way is reported as a warning.

        Raises:
            UserError: there are checkpoints, but all are broken.
        """
        folders = self.checkpoints()
        first_fault: BrokenCheckpoint | None = None
        for folder in reversed(folders):
            try:
                return read_checkpoint(folder)
            except BrokenCheckpoint as error:
                if not folder.exists():
                    # Pruned by the training process between the listing and the reading.
                    return self.newest_checkpoint()
                first_fault = first_fault or error
                self._report_broken(folder, "taking the one before it", error)
        if first_fault is not None:
            raise UserError(
                f"{self.path}: all {len(folders)} checkpoints are broken (the newest: {first_fault}); restore one, or "
                f"remove {self.checkpoints_path} to start again"
            )
        return None

    def best_checkpoint(self) -> Checkpoint | None:
        """The one of lowest ``state["val_loss"]`` that verifies, or None; each broken one on the way is reported."""
        for folder in self._by_loss(self.checkpoints()):
            try:
                return read_checkpoint(folder)
            except UserError as error:
                if folder.exists():  # or it was pruned meanwhile
                    self._report_broken(folder, "taking the next best one", error)
        return None

    def prune(self, keep_last: int, keep_every: int | None = None, keep_best: bool = True) -> None:
        """Remove the checkpoints that no rule keeps; those found broken do not count as kept.

        Args:
            keep_last: keep this many of the newest.
            keep_every: keep those whose step is a multiple of this.
            keep_best: keep the one of lowest ``state["val_loss"]`` (one without it is no candidate).
        """
        assert keep_last >= 1
        folders = self.checkpoints()
        good = [folder for folder in folders if (folder, folder.stat().st_ino) not in self._broken]
        if len(good) <= keep_last:
            return
        kept = {folder for folder in good if keep_every and (checkpoint_step(folder) or 0) % keep_every == 0}
        if keep_best:
            kept.update(self._by_loss(good)[:1])
        for folder in folders[: folders.index(good[-keep_last])]:
            if folder not in kept:
                remove_checkpoint(folder)

    def cut_metrics(self, step: int) -> None:
        """Drop the rows of metrics.csv and diagnostics.csv past ``step``, the one that training goes on from."""
        self.metrics.cut(step)
        self.diagnostics.cut(step)

    def finish(self, step: int) -> None:
        """Mark the run as finished after ``step`` optimiser steps."""
        write_atomically(self.path / FINISHED_FILE, json.dumps({"finished_step": step}) + "\n")
        self.status = "finished"

    def _report_broken(self, folder: Path, then: str, error: UserError) -> None:
        self._broken.add((folder, folder.stat().st_ino))
        _logger.warning("broken checkpoint, %s: %s", then, error)

    def _by_loss(self, folders: list[Path]) -> list[Path]:
        """Those that were validated, the lowest loss first. Their tensors are not read."""
        losses: dict[Path, float] = {}
        for folder in folders:
            try:
                loss = read_checkpoint(folder, verify=False).state.get("val_loss")
            except UserError:
                continue
            if isinstance(loss, int | float) and math.isfinite(loss):
                losses[folder] = loss
        return sorted(losses, key=lambda folder: losses[folder])

    def _find_status(self) -> Status:
        if (self.path / FINISHED_FILE).is_file():
            return "finished"
        return "resume" if self.config_path.is_file() else "new"

    def _refuse_other_content(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another run.dir")
        with failing_in_one_line(self.path):
            content = {entry.name for entry in self.path.iterdir()}
        foreign = sorted(content - _BEFORE_CONFIG)
        if foreign and CONFIG_FILE not in content:
            raise UserError(
                f"{self.path} is not empty and holds no run ({foreign[0]} but no {CONFIG_FILE}); choose another run.dir"
            )

    def _refuse_other_config(self, config: dict[str, Any], free: Sequence[str]) -> None:
        if self.config_path.is_file():
            refuse_other_config(self.path, "run.dir", self.config, config, free)


def parse_config(content: bytes, where: str | Path) -> dict[str, Any]:
    """The configuration in the ``content`` of ``where``; a :class:`UserError` if it is no YAML mapping."""
    config = parse_yaml(content, where)
    if not isinstance(config, dict):
        raise UserError(f"{where} is no configuration")
    return config


def refuse_other_config(
    where: str | Path, option: str, there: Mapping[str, Any], here: Mapping[str, Any], free: Sequence[str]
) -> None:
    """Raise a :class:`UserError` if the run that is ``there`` differs from ``here`` in more than ``free`` keys.

    ``option`` is the one by which ``where`` was given.
    """
    differences = [
        text for key, text in _differences(there, here) if not any(f"{key}.".startswith(f"{f}.") for f in free)
    ]
    if differences:
        more = len(differences) - _SHOWN_DIFFERENCES
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(
            f"{where} holds a run of another configuration: {shown}; choose another {option}, or the same values"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Each dotted key whose value differs, and a text with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            inner = f"{key}.{name}" if key else str(name)
            yield from _differences(old.get(name, _MISSING), new.get(name, _MISSING), inner)
    elif old != new:
        yield key, f"{key} is {_shown(old)} there and {_shown(new)} here"


def _shown(value: Any) -> str:
    return "not set" if value is _MISSING else json.dumps(value, ensure_ascii=False, default=str)
