"""environment.json: one entry a start, true to git and the installed packages."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import environment, record_environment
from llmstack.errors import UserError


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_entries_are_appended_and_true(tmp_path, monkeypatch):
    repository = tmp_path / "code"
    (repository / "inner").mkdir(parents=True)
    git(repository, "init", "-q")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_CODE", repository / "inner" / "code.py")
    path = tmp_path / "environment.json"
    (repository / "inner" / "code.py").write_text("")
    (repository / "a.py").write_text("x = 1\n")
    record_environment(path)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    record_environment(path)
    (repository / "a.py").write_text("x = 2\n")
    record_environment(path)
    untracked, clean, dirty = json.loads(path.read_text())
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert untracked["git"] is None  # installed code in somebody's repository is not that repository's
    assert clean["git"] == {"commit": commit, "diff": ""}
    assert dirty["git"]["commit"] == commit
    assert "-x = 1\n+x = 2\n" in dirty["git"]["diff"]
    assert dirty["packages"]["torch"] == torch.__version__
    assert "llmstack" in dirty["packages"]
    assert (dirty["python"], dirty["host"], dirty["pid"]) == (
        platform.python_version(),
        socket.gethostname(),
        os.getpid(),
    )
    assert dirty["folder"] == str(tmp_path)
    assert dirty["command"]


def test_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_CODE", tmp_path / "code.py")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    record_environment(tmp_path / "environment.json")
    assert json.loads((tmp_path / "environment.json").read_text())[0]["git"] is None


@pytest.mark.parametrize("content", ["{}", "not json"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "environment.json"
    path.write_text(content)
    with pytest.raises(UserError, match="move it away"):
        record_environment(path)
    assert path.read_text() == content
