"""The checkpoint format, version 1: a folder of safetensors and JSON. Nothing in it is code, nothing is unpickled.

    step-00000025/
        checkpoint.json         format_version, step, config, state, files (name, role, size, sha256), its own sha256
        model.safetensors       weights and persistent buffers under their plain names, a tied head once
        optimizer.safetensors   optional; keys `<parameter name>/<state name>`
        tokenizer/              optional; the tokenizer's files

``config`` holds the fields of ``ModelConfig``; ``state`` is whatever JSON the training loop needs to go on. Several
files may have one role. A folder appears under its final name complete, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TextIO

from safetensors import SafetensorError, TensorSpec, serialize_file
from torch import Tensor

from llmstack.checkpoint.files import failing_in_one_line, sync_file, sync_folder
from llmstack.checkpoint.tensors import TensorFiles
from llmstack.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"
TOKENIZER_FOLDER = "tokenizer"

Role = Literal["model", "optimizer", "tokenizer"]

_PARTIAL = ".partial-"
_NAME = re.compile(r"step-(\d{8,})")


class BrokenCheckpoint(UserError):
    """A checkpoint that cannot be trusted; the message names the file and the reason."""


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    """Path within the checkpoint, with forward slashes."""
    role: Role
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Checkpoint:
    """What ``read_checkpoint`` found. Tensors are read when they are asked for."""

    path: Path
    step: int
    """Optimiser steps done."""
    config: dict[str, Any]
    """Fields of ``ModelConfig``."""
    state: dict[str, Any]
    """Training state, plain JSON."""
    files: tuple[CheckpointFile, ...]

    def weights(self) -> TensorFiles:
        """Parameters and persistent buffers by name, in their stored dtypes."""
        return self._tensors("model")

    def optimizer(self) -> TensorFiles:
        """Optimiser state by `<parameter name>/<state name>`; empty if none was saved."""
        return self._tensors("optimizer")

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the tokenizer's files, if the checkpoint has one."""
        has_one = any(file.role == "tokenizer" for file in self.files)
        return self.path / TOKENIZER_FOLDER if has_one else None

    def _tensors(self, role: Role) -> TensorFiles:
        return TensorFiles.of(self.path / file.name for file in self.files if file.role == role)


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimiser steps."""
    return f"step-{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step that a folder's name stands for; none if it is not named like a checkpoint."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def write_checkpoint(
    folder: str | Path,
    *,
    step: int,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write the checkpoint ``folder`` (``…/step-00000025``); one that is there already is replaced.

    Everything is written and synced in a hidden folder beside it, which then takes the final name. Those that killed
    writers left behind are removed first.

    Args:
        folder: where it shall be.
        step: optimiser steps done.
        config: fields of ``ModelConfig``.
        weights: parameters and persistent buffers; with tied embeddings ``lm_head.weight`` is left out.
        optimizer: tensors by `<parameter name>/<state name>`.
        state: plain JSON values.
        tokenizer: folder whose files are copied.

    Raises:
        UserError: disk full, no permission, no such tokenizer; nothing is left under the final name.
    """
    folder = Path(folder)
    tensors: dict[Role, dict[str, Tensor]] = {"model": dict(weights)}
    if config.get("tie_word_embeddings"):
        tensors["model"].pop("lm_head.weight", None)
    if optimizer is not None:
        tensors["optimizer"] = dict(optimizer)
    with failing_in_one_line(folder):
        _refuse_to_replace_other_folders(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        partial = folder.parent / f"{_PARTIAL}{folder.name}-{uuid.uuid4().hex[:8]}"
        partial.mkdir()
        try:
            with open(partial / MANIFEST, "w", encoding="utf-8") as manifest:
                _mark_as_in_work(manifest)
                files = [_write_tensors(partial, role, values) for role, values in tensors.items()]
                files += _copy_tokenizer(partial, Path(tokenizer)) if tokenizer is not None else []
                content = {"step": step, "config": dict(config), "state": dict(state or {})}
                manifest.write(_manifest_text({**content, "files": [asdict(file) for file in files]}))
                manifest.flush()
                os.fsync(manifest.fileno())
                sync_folder(partial)
                _move_into_place(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def read_checkpoint(folder: str | Path, verify: bool = True) -> Checkpoint:
    """Read ``checkpoint.json`` and check every file it lists.

    Args:
        folder: one checkpoint.
        verify: check the SHA-256 of every file, too; otherwise existence and size alone.

    Raises:
        BrokenCheckpoint: a file is missing, truncated or changed, or the format is a newer one.
        UserError: no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no checkpoint folder {folder}")
    content = _read_manifest(folder / MANIFEST)
    try:
        files = tuple(CheckpointFile(**file) for file in content["files"])
        checkpoint = Checkpoint(folder, content["step"], content["config"], content["state"], files)
    except (KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"{folder / MANIFEST} is damaged: not the fields of version 1 ({error})") from error
    for file in files:
        _check_file(folder, file, verify)
    return checkpoint


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint so that at no moment a part of it can be mistaken for one."""
    with failing_in_one_line(folder):
        doomed = folder.with_name(f"{_PARTIAL}{folder.name}-{uuid.uuid4().hex[:8]}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed writers left in ``parent``: hidden folders whose manifest nobody holds locked any more."""
    for folder in parent.glob(f"{_PARTIAL}*"):
        if not _is_in_work(folder):
            shutil.rmtree(folder, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_tensors(folder: Path, role: Role, tensors: dict[str, Tensor]) -> CheckpointFile:
    path = folder / f"{role}.safetensors"
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # The library's own save_file for torch needs numpy, which a machine with torch alone has not.
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in plain.items()
    }
    try:
        serialize_file(specs, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # The library makes files that only their owner may read; let the user's umask decide, as everywhere.
    path.chmod(stat.S_IMODE((folder / MANIFEST).stat().st_mode))
    return _finished(folder, path, role)


def _copy_tokenizer(folder: Path, source: Path) -> list[CheckpointFile]:
    if not source.is_dir():
        raise UserError(f"no tokenizer folder {source}")
    target = folder / TOKENIZER_FOLDER
    target.mkdir()
    files = []
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
            files.append(_finished(folder, target / path.name, "tokenizer"))
    sync_folder(target)
    return files


def _finished(folder: Path, path: Path, role: Role) -> CheckpointFile:
    sync_file(path)
    return CheckpointFile(path.relative_to(folder).as_posix(), role, path.stat().st_size, sha256_of(path))


def _move_into_place(partial: Path, folder: Path) -> None:
    if folder.is_dir():
        old = folder.with_name(f"{_PARTIAL}{folder.name}-{uuid.uuid4().hex[:8]}")
        os.rename(folder, old)
        os.rename(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(partial, folder)
    sync_folder(folder.parent)


def _refuse_to_replace_other_folders(folder: Path) -> None:
    if folder.exists() and checkpoint_step(folder) is None and not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} exists and is no checkpoint; choose another place")


def _mark_as_in_work(manifest: TextIO) -> None:
    try:
        fcntl.flock(manifest.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Without locks a second writer beside this one would take its folder for a leftover; a run has only one.
        return


def _is_in_work(folder: Path) -> bool:
    try:
        with open(folder / MANIFEST, "r+b") as manifest:
            fcntl.flock(manifest.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _manifest_text(content: dict[str, Any]) -> str:
    # Once through JSON first: the digest is of what a reader will see (lists for tuples, strings for keys).
    values = json.loads(json.dumps({"format_version": FORMAT_VERSION, **content}))
    return json.dumps({**values, "sha256": _digest(values)}, indent=1) + "\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BrokenCheckpoint(f"{path} is damaged: no JSON ({error})") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BrokenCheckpoint(
            f"{path} has format version {version}; this llmstack reads up to {FORMAT_VERSION}: use a newer llmstack"
        )
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise BrokenCheckpoint(f"{path} is damaged: its own SHA-256 does not match")
    return content


def _check_file(folder: Path, file: CheckpointFile, verify: bool) -> None:
    relative = PurePosixPath(file.name)
    path = folder / relative
    if relative.is_absolute() or ".." in relative.parts:
        raise BrokenCheckpoint(f"{folder / MANIFEST}: the file {file.name} lies outside the checkpoint")
    try:
        size = path.stat().st_size
        if size != file.size:
            raise BrokenCheckpoint(f"{path} is damaged: {size:,} bytes instead of {file.size:,}")
        if verify and sha256_of(path) != file.sha256:
            raise BrokenCheckpoint(f"{path} is damaged: its SHA-256 does not match")
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error
