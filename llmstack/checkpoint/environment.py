"""environment.json: where and with what each start of a run ran, so that a result can be traced."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from llmstack.checkpoint.files import write_atomically
from llmstack.errors import UserError

_PACKAGES = (
    "llmstack",
    "torch",
    "lightning",
    "torchmetrics",
    "deepspeed",
    "datasets",
    "safetensors",
    "tokenizers",
    "sentencepiece",
    "tiktoken",
    "transformers",
    "lm_eval",
    "triton",
    "numpy",
)
_MAX_DIFF = 2**20
_GIT_SECONDS = 20


def record_environment(path: str | Path) -> None:
    """Append an entry for this start to the list in ``path``.

    An entry has: started (UTC), host, pid, command (list), folder, git (commit and the diff of tracked files against
    it; null outside a repository), python, platform, packages {name: version}, devices (list).

    Raises:
        UserError: the file there is no such list, or it cannot be written.
    """
    path = Path(path)
    write_atomically(path, json.dumps([*_earlier(path), _entry()], indent=1) + "\n")


def _earlier(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable ({error}); move it away") from error
    if not isinstance(entries, list):
        raise UserError(f"{path} is no list of starts; move it away")
    return entries


SOURCE_FILE = "source.json"
"""Of a package that was copied for a job: what its checkout was."""

_CODE = Path(__file__)
"""Part of the code whose state is recorded."""


def _entry() -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": sys.argv,
        "folder": os.getcwd(),
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "devices": _devices(),
    }


def package_versions() -> dict[str, str]:
    """Of the packages that a result depends on; those that are not installed are left out."""
    return {name: version for name in _PACKAGES if (version := _version(name)) is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit and diff of the checkout that this code runs from, or is a copy of; none if it was installed."""
    copied = _CODE.parents[1] / SOURCE_FILE
    if copied.is_file():
        return json.loads(copied.read_text(encoding="utf-8"))
    if _git("ls-files", "--error-unmatch", _CODE.name) is None:
        return None
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD") if commit else None
    if diff is not None and len(diff) > _MAX_DIFF:
        diff = f"{diff[:_MAX_DIFF]}\n[cut at {_MAX_DIFF:,} of {len(diff):,} characters]"
    return {"commit": commit.strip() if commit else None, "diff": diff}


def _git(*arguments: str) -> str | None:
    """Its output; none if git is absent, refuses or takes too long."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_CODE.parent, capture_output=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def _devices() -> list[str]:
    processors = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads ({platform.machine()})"
    if not torch.cuda.is_available():
        return [processors]
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [processors, *(f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in properties)]
