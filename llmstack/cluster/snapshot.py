"""A copy of the code that a job begins with, so that it comes back to the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from functools import cache
from importlib import metadata
from pathlib import Path

import llmstack
from llmstack.checkpoint.environment import SOURCE_FILE, git_state
from llmstack.checkpoint.files import failing_in_one_line, sync_folder
from llmstack.shipped import configs_folder, slurm_folder

SUMS = "SHA256SUMS"

PACKAGES = "packages.txt"
"""File beside the copy: :func:`installed_packages` when the run was submitted."""


def snapshot_path(folder: Path) -> Path:
    """Where the copy of the present code belongs: ``folder/code-<digest>``."""
    return folder / f"code-{hashlib.sha256(_contents()[SUMS]).hexdigest()[:12]}"


def take_snapshot(folder: Path) -> None:
    """Copy the package, with its configurations and templates, to :func:`snapshot_path`.

    Code that is there already is not copied again, so a job that waits or runs keeps its own.

    Raises:
        UserError: it cannot be written.
    """
    target = snapshot_path(folder)
    if target.is_dir():
        return
    partial = folder / f".{target.name}.{os.getpid()}.partial"
    with failing_in_one_line(target):
        try:
            for name, content in _contents().items():
                file = partial / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync_folder(folder)


@cache
def _contents() -> dict[str, bytes]:
    """Each file of a copy by its path there."""
    package = Path(llmstack.__file__).resolve().parent
    files = {f"llmstack/{path.relative_to(package)}": path for path in _sources(package)}
    for name, origin in (("configs", configs_folder()), ("slurm", slurm_folder())):
        files |= {f"llmstack/{name}/{path.relative_to(origin)}": path for path in _sources(origin)}
    contents = {name: path.read_bytes() for name, path in sorted(files.items())}
    contents[f"llmstack/{SOURCE_FILE}"] = json.dumps(git_state(), indent=1).encode()
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    return contents | {SUMS: sums.encode()}


@cache
def installed_packages() -> str:
    """All packages of this environment with their versions, as pip lists them."""
    found = {(one.metadata["Name"] or "").lower(): one.version for one in metadata.distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()) if name)


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
