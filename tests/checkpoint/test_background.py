"""Writing in a thread beside the training: nothing is lost, no error is lost, and no copy changes under the writer."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import BackgroundWriter, host_copy, read_checkpoint
from llmstack.errors import UserError


def test_work_runs_beside_the_caller_and_in_order() -> None:
    writer, go, done = BackgroundWriter(), threading.Event(), []
    assert not writer.busy

    def first() -> None:
        assert go.wait(30)
        done.append(threading.current_thread())

    writer.submit(first)
    assert writer.busy
    assert done == []
    go.set()
    writer.submit(lambda: done.append(list(done)))
    writer.wait()
    assert not writer.busy
    assert done == [done[0], [done[0]]]
    assert done[0] is not threading.main_thread()
    writer.wait()


@pytest.mark.parametrize("then", ["submit", "wait"])
def test_an_error_is_raised_once_as_it_was(then: str) -> None:
    writer, error, started = BackgroundWriter(), UserError("cannot write there"), []

    def fail() -> None:
        raise error

    writer.submit(fail)
    with pytest.raises(UserError) as raised:
        writer.submit(lambda: started.append(1)) if then == "submit" else writer.wait()
    assert raised.value is error
    writer.wait()
    assert started == []
    writer.submit(lambda: started.append(2))
    writer.wait()
    assert started == [2]


def test_tensors_are_released_when_they_are_written_or_failed_to_be() -> None:
    """Without waiting for the garbage collector: they are as large as the model."""
    writer = BackgroundWriter()

    def submit(fails: bool) -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(10)

        def work() -> None:
            assert not tensor.any()
            if fails:
                raise UserError("no")

        writer.submit(work)
        return weakref.ref(tensor)

    gc.disable()
    try:
        written = submit(False)
        writer.wait()
        assert written() is None
        failed = submit(True)
        with contextlib.suppress(UserError):
            writer.wait()
        assert failed() is None
    finally:
        gc.enable()


EXIT = """
import sys, time, torch
from llmstack.checkpoint import BackgroundWriter, write_checkpoint
def work():
    time.sleep(1)
    write_checkpoint(sys.argv[1], step=3, config={}, weights={"w": torch.arange(5)})
BackgroundWriter().submit(work)
raise SystemExit(7)
"""


def test_the_interpreter_waits_for_a_write_in_progress(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003"
    command = [sys.executable, "-W", "ignore", "-c", EXIT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert torch.equal(read_checkpoint(folder).weights()["w"], torch.arange(5))


def test_a_host_copy_stays_as_it_was() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    copies = [host_copy(parameter), host_copy(parameter.T), host_copy(parameter[1:2].expand(5, 4))]
    with torch.no_grad():
        parameter.zero_()
    for copy, shape in zip(copies, ((3, 4), (4, 3), (5, 4)), strict=True):
        assert torch.equal(copy, torch.ones(shape))
        assert copy.device.type == "cpu"
        assert not copy.requires_grad
    assert host_copy(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
