"""Builds of C++ extensions that are really killed, and those that are not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = 'extern "C" int answer() {\n    return 42;\n}\n'

USE = """
import contextlib, ctypes, sys
name = sys.argv[3]
import torch.utils.cpp_extension as extensions
from llmstack.training.extension_builds import building_extensions
guard, guard_again = [building_extensions() if sys.argv[1] == "ours" else contextlib.nullcontext() for _ in range(2)]
with guard, guard_again:
    library = extensions.load(name, sys.argv[2], is_python_module=False)
print(ctypes.CDLL(library).answer())
"""

COMPILER = """#!/bin/sh
# g++ that writes down what it begins and ends, and waits before a phase as long as the test says so.
case "$*" in
    *-shared*) phase=link ;;
    *" -c "*) phase=compile ;;
    *) exec g++ "$@" ;;
esac
echo "begin $phase" >> {log}
if [ "$phase" = link ] && [ -e {folder}/half ]; then
    for word in "$@"; do case "$word" in *.so) echo "half a library" > "$word" ;; esac; done
fi
while [ -e {folder}/hold-$phase ]; do sleep 0.1; done
g++ "$@"
status=$?
echo "end $phase" >> {log}
exit $status
"""

Use = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Use]:
    """``use()`` builds the extension, or finds it built, in a session of its own, and prints what it returns."""
    source, compiler = tmp_path / "answer.cpp", tmp_path / "c++"
    source.write_text(SOURCE)
    compiler.write_text(COMPILER.format(folder=tmp_path, log=tmp_path / "log"))
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    started: list[subprocess.Popen[str]] = []

    def run(whose: str = "ours", name: str = "answer") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", USE, whose, str(source), name]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield run
    for process in started:
        kill_session(process)


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a process and all it has started, as a scheduler does: ninja gives each compiler a group of its own."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait(timeout=10)


def log(folder: Path) -> list[str]:
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.05)


def output(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize("phase", ["compile", "link"])
def test_a_killed_build_holds_nobody_up(use: Use, tmp_path: Path, phase: str) -> None:
    """Killed with all its processes; in the second case with half a library where the whole one belongs."""
    (tmp_path / f"hold-{phase}").touch()
    (tmp_path / "half").touch()
    killed = use()
    wait_for(lambda: f"begin {phase}" in log(tmp_path))
    baton = tmp_path / "extensions" / "answer" / "lock"
    wait_for(lambda: phase == "compile" or (baton.parent / "answer.so").exists())
    kill_session(killed)
    assert baton.exists()
    for mark in (f"hold-{phase}", "half"):
        (tmp_path / mark).unlink()
    out, err = output(use())
    assert out == "42\n"
    assert f"cleared {baton}" in err
    assert not baton.exists()


def test_compilers_that_outlive_their_killed_parent_are_waited_for(use: Use, tmp_path: Path) -> None:
    (tmp_path / "hold-compile").touch()
    killed = use()
    wait_for(lambda: "begin compile" in log(tmp_path))
    killed.kill()
    killed.wait(timeout=10)
    following = use()
    assert "waiting for process" in first_line(following)
    (tmp_path / "hold-compile").unlink()
    assert output(following)[0] == "42\n"
    assert log(tmp_path)[:2] == ["begin compile", "end compile"], "two compilers wrote into one folder at a time"


def test_ranks_that_start_together_build_once(use: Use, tmp_path: Path) -> None:
    ranks = [use(), use(), use()]
    assert [output(rank)[0] for rank in ranks] == ["42\n"] * 3
    assert log(tmp_path) == ["begin compile", "end compile", "begin link", "end link"]


def test_a_build_waits_only_for_builds_of_the_same_extension(use: Use, tmp_path: Path) -> None:
    (tmp_path / "hold-link").touch()
    slow = use()
    wait_for(lambda: "begin link" in log(tmp_path))
    other = use(name="another")
    wait_for(lambda: log(tmp_path).count("begin link") == 2)
    assert slow.poll() is None
    (tmp_path / "hold-link").unlink()
    assert [output(one)[0] for one in (slow, other)] == ["42\n"] * 2


def test_a_living_build_of_another_program_is_waited_for(use: Use, tmp_path: Path) -> None:
    (tmp_path / "hold-compile").touch()
    other = use("another program's")
    wait_for(lambda: "begin compile" in log(tmp_path))
    following = use()
    assert f"waiting for process {other.pid}" in first_line(following)
    (tmp_path / "hold-compile").unlink()
    out, err = output(following)
    assert out == output(other)[0] == "42\n"
    assert "cleared" not in err
    assert log(tmp_path) == ["begin compile", "end compile", "begin link", "end link"]


def test_a_baton_of_unknown_origin_is_cleared_only_when_it_is_old(use: Use, tmp_path: Path) -> None:
    """Its holder may be alive on another machine that shares the folder."""
    baton = tmp_path / "extensions" / "answer" / "lock"
    baton.parent.mkdir(parents=True)
    baton.touch()
    waiting = use()
    assert "when 30 minutes have passed without a change" in first_line(waiting)
    time.sleep(2)
    assert baton.exists()
    assert waiting.poll() is None
    for path in (baton, baton.parent):
        os.utime(path, (time.time() - 1801,) * 2)
    out, err = output(waiting)
    assert out == "42\n"
    assert f"cleared {baton}" in err
