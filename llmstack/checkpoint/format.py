"""The checkpoint format, version 1: a folder of safetensors and JSON. Nothing in it is code, nothing is unpickled.

    step-00000025/
        checkpoint.json         format_version, step, config, state, files (name, role, size, sha256), its own sha256
        model.safetensors       weights and persistent buffers under their plain names, a tied head once
        optimizer.safetensors   optional; keys `<parameter name>/<state name>`
        tokenizer/              optional; the tokenizer's files

``config`` holds the fields of ``ModelConfig``; ``state`` is whatever JSON the training loop needs to go on. Several
files may have one role: of two processes each writes its own share (``model-00001-of-00002.safetensors``, …), and a
reader sees the tensors of all. A folder appears under its final name complete, or not at all.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TextIO

from safetensors import SafetensorError, TensorSpec, serialize_file
from torch import Tensor

from llmstack.checkpoint.files import failing_in_one_line, sync_file, sync_folder
from llmstack.checkpoint.ranks import ALONE, Ranks, on_every_rank
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
class _Written:
    """A file that a rank has written, and the tensors in it."""

    file: CheckpointFile
    tensors: tuple[str, ...] = ()


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
    ranks: Ranks = ALONE,
) -> Path:
    """Write the checkpoint ``folder`` (``…/step-00000025``); one that is there already is replaced.

    Everything is written and synced in a hidden folder beside it, which then takes the final name. Those that killed
    writers left behind are removed first. Where several ranks write, each calls this with its share of the tensors
    and the same other arguments; either all return, or all raise.

    Args:
        folder: where it shall be; on a file system that all ranks see.
        step: optimiser steps done.
        config: fields of ``ModelConfig``.
        weights: parameters and persistent buffers; with tied embeddings ``lm_head.weight`` is left out.
        optimizer: tensors by `<parameter name>/<state name>`.
        state: plain JSON values.
        tokenizer: folder whose files are copied.
        ranks: the processes that write this checkpoint together.

    Raises:
        UserError: disk full, no permission, no such tokenizer, on whichever rank; nothing is left under the final name.
    """
    folder = Path(folder)
    tensors: dict[Role, dict[str, Tensor]] = {"model": dict(weights)}
    if config.get("tie_word_embeddings"):
        tensors["model"].pop("lm_head.weight", None)
    if optimizer is not None:
        tensors["optimizer"] = dict(optimizer)
    content = {"step": step, "config": dict(config), "state": dict(state or {})}
    with ExitStack() as hidden:
        first = ranks.rank == 0
        name = on_every_rank(ranks, folder, lambda: hidden.enter_context(_hidden_folder(folder)) if first else None)[0]
        assert name is not None
        partial = folder.parent / name
        source = Path(tokenizer) if tokenizer is not None and first else None
        shares = on_every_rank(ranks, folder, lambda: _write_share(partial, tensors, source, ranks))
        on_every_rank(ranks, folder, lambda: _finish(partial, folder, content, shares) if first else None)
    return folder


def receive_checkpoint(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` put a checkpoint's files into a hidden folder, which is named ``folder`` once they verify.

    Raises:
        BrokenCheckpoint: they do not verify; nothing is left under the final name.
        UserError: disk full, no permission.
    """
    with failing_in_one_line(folder), _hidden_folder(folder) as name:
        partial = folder.parent / name
        fill(partial)
        for file in read_checkpoint(partial).files:
            sync_file(partial / file.name)
        sync_file(partial / MANIFEST)
        sync_folder(partial)
        _move_into_place(partial, folder)


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


def remove_leftovers(parent: Path, names: str = "step-*") -> None:
    """Remove what killed writers left in ``parent``: hidden folders whose manifest nobody holds locked any more.

    Args:
        parent: folder of checkpoints.
        names: pattern of their names; a folder of the user's may hold other things that only look alike.
    """
    for folder in parent.glob(f"{_PARTIAL}{names}-????????"):
        if not _is_in_work(folder):
            shutil.rmtree(folder, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _hidden_folder(folder: Path) -> Iterator[str]:
    """Name of a new folder beside ``folder``, which counts as in work during the block and is removed if that fails."""
    _refuse_to_replace_other_folders(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent, glob.escape(folder.name) if checkpoint_step(folder) is None else "step-*")
    partial = folder.parent / f"{_PARTIAL}{folder.name}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        with open(partial / MANIFEST, "w", encoding="utf-8") as manifest:
            _mark_as_in_work(manifest)
            yield partial.name
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_share(
    partial: Path, tensors: dict[Role, dict[str, Tensor]], tokenizer: Path | None, ranks: Ranks
) -> list[_Written]:
    """This rank's files, on the disk."""
    if not partial.is_dir():
        raise UserError(f"{partial}, made by rank 0, is not seen by this rank; the run folder must be shared by all")
    written = [
        _write_tensors(partial, role, values, ranks)
        for role, values in tensors.items()
        if values or ranks.world_size == 1
    ]
    if tokenizer is not None:
        written += [_Written(file) for file in _copy_tokenizer(partial, tokenizer)]
    sync_folder(partial)
    return written


def _finish(partial: Path, folder: Path, content: dict[str, Any], shares: list[list[_Written]]) -> None:
    """Write the manifest of all ranks' files and give the folder its name."""
    written = [one for share in shares for one in share]
    names = Counter((one.file.role, name) for one in written for name in one.tensors)
    twice = [name for (_, name), count in names.items() if count > 1]
    assert not twice, f"given by two ranks: {twice[0]}"
    with open(partial / MANIFEST, "w", encoding="utf-8") as manifest:
        manifest.write(_manifest_text({**content, "files": [asdict(one.file) for one in written]}))
        manifest.flush()
        os.fsync(manifest.fileno())
    sync_folder(partial)
    _move_into_place(partial, folder)


def _write_tensors(partial: Path, role: Role, tensors: dict[str, Tensor], ranks: Ranks) -> _Written:
    part = f"-{ranks.rank + 1:05d}-of-{ranks.world_size:05d}" if ranks.world_size > 1 else ""
    path = partial / f"{role}{part}.safetensors"
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
    path.chmod(stat.S_IMODE((partial / MANIFEST).stat().st_mode))
    return _Written(_finished(partial, path, role), tuple(tensors))


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
    if checkpoint_step(folder) is not None or not folder.exists() or (folder / MANIFEST).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
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
