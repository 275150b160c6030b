"""metrics.csv: one row a step, nothing lost, nothing doubled."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest

from llmstack.checkpoint import MetricsFile, MetricsRow
from llmstack.checkpoint.metrics import COLUMNS
from llmstack.errors import UserError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def row(step: int, **values: float) -> MetricsRow:
    return MetricsRow(step, tokens_seen=step * 1024, loss=1 / step, learning_rate=3e-4, **values)


def steps(path: Path) -> list[int]:
    return [values["step"] for values in MetricsFile(path).read()]


def test_schema_and_exact_numbers(path):
    assert COLUMNS == (
        "step",
        "tokens_seen",
        "loss",
        "learning_rate",
        "grad_norm",
        "spike_score",
        "step_seconds",
        "data_seconds",
        "forward_backward_seconds",
        "optimizer_seconds",
        "communication_seconds",
        "tokens_per_second",
        "tokens_per_second_per_device",
        "tflops_per_device_palm",
        "mfu_palm",
        "tflops_per_device_causal",
        "mfu_causal",
        "peak_memory_bytes",
        "val_loss",
        "val_perplexity",
        "val_tokens",
    )
    written = MetricsRow(3, 2**53 + 1, 1 / 3, 1e-5, float("inf"), 0.1 + 0.2, 1e21)
    MetricsFile(path).append(written)
    (read,) = MetricsFile(path).read()
    assert read == {**written.__dict__}
    assert type(read["tokens_seen"]) is int
    with open(path, newline="") as file:
        (by_the_library,) = csv.DictReader(file)
    assert float(by_the_library["loss"]) == 1 / 3
    assert by_the_library["val_loss"] == ""


def test_rows_of_several_starts_and_never_two_of_one_step(path):
    first = MetricsFile(path)
    first.append(row(1))
    first.append(row(2))
    second = MetricsFile(path)
    for step in (1, 2):
        with pytest.raises(ValueError, match=f"a row of step {step} after one of step 2"):
            second.append(row(step))
    second.append(row(3))
    assert steps(path) == [1, 2, 3]
    assert path.read_text().count("step,") == 1


def test_amending_fills_the_last_row_in_place(path):
    file = MetricsFile(path)
    file.append(row(1))
    file.append(row(2))
    inode = path.stat().st_ino
    file.amend_last(val_loss=2.5, val_perplexity=12.182493960703473, val_tokens=50)
    assert path.stat().st_ino == inode
    MetricsFile(path).append(row(3))
    rows = file.read()
    assert [values["val_loss"] for values in rows] == [None, 2.5, None]
    assert rows[1] == row(2, val_loss=2.5, val_perplexity=12.182493960703473, val_tokens=50).__dict__
    MetricsFile(path).amend_last(val_loss=1.5)
    assert file.read()[-1]["val_loss"] == 1.5
    with pytest.raises(ValueError, match="step 3 has val_loss already"):
        MetricsFile(path).amend_last(val_loss=1.0)
    assert steps(path) == [1, 2, 3]


def test_amending_an_empty_file_is_refused(path):
    with pytest.raises(ValueError, match="no row to amend"):
        MetricsFile(path).amend_last(val_loss=1.0)


def test_a_row_is_one_write_and_survives_sigkill(path, fork):
    MetricsFile(path).append(row(1))

    def work() -> None:
        file = MetricsFile(path)
        file.append(row(2))
        file.amend_last(val_loss=3.0)
        file.append(row(3))
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(os.waitpid(fork(work), 0)[1]) == signal.SIGKILL
    assert steps(path) == [1, 2, 3]
    assert MetricsFile(path).read()[1]["val_loss"] == 3.0


def test_killed_at_random_while_appending_and_amending(path, fork):
    """Whatever the moment, every line is whole, and the next start goes on after the last."""

    def work() -> None:
        file = MetricsFile(path)
        step = (steps(path) or [0])[-1]
        while True:
            step += 1
            file.append(row(step))
            file.amend_last(val_loss=float(step), val_tokens=step)

    for milliseconds in (30, 41, 57, 73):
        process = fork(work)
        signal.sigtimedwait([], milliseconds / 1000)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert not path.exists() or path.read_text().endswith("\n")
        rows = MetricsFile(path).read()
        assert [values["step"] for values in rows] == list(range(1, len(rows) + 1))
        assert {values["val_loss"] for values in rows if values["val_loss"] != values["step"]} <= {None}
    # A row may lack its validation only where a kill fell between the two calls.
    assert sum(values["val_loss"] is None for values in rows) <= 4
    assert len(rows) > 10


@pytest.mark.parametrize("tail", ["3,30", "3,3072,0.5,0.0003,,,,,,", "\0\0\0\0"])
def test_half_a_line_is_not_read_and_is_gone_after_the_next_row(path, tail):
    for step in (1, 2):
        MetricsFile(path).append(row(step))
    whole = path.read_bytes()
    path.write_bytes(whole + tail.encode())
    assert steps(path) == [1, 2]
    MetricsFile(path).append(row(3))
    assert steps(path) == [1, 2, 3]
    path.write_bytes(whole + tail.encode())
    MetricsFile(path).cut(99)
    assert path.read_bytes() == whole


def test_cut_drops_later_rows_and_the_file_goes_on(path):
    file = MetricsFile(path)
    for step in range(1, 31):
        file.append(row(step))
    file.cut(25)
    assert steps(path) == list(range(1, 26))
    file.append(row(26))
    assert steps(path) == list(range(1, 27))
    before = path.stat()
    file.cut(26)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    file.cut(0)
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    assert os.listdir(path.parent) == ["metrics.csv"]


def test_no_file_reads_as_no_rows_and_cutting_makes_none(path):
    assert MetricsFile(path).read() == []
    MetricsFile(path).cut(5)
    assert not path.exists()


@pytest.mark.parametrize("content", ["epoch,loss\n1,2\n", "epoch,loss", ",".join(COLUMNS[:-1]) + "\n"])
def test_another_header_is_refused_and_kept(path, content):
    path.write_text(content)
    for use in (
        lambda: MetricsFile(path).read(),
        lambda: MetricsFile(path).append(row(1)),
        lambda: MetricsFile(path).cut(1),
    ):
        with pytest.raises(UserError, match=r"metrics.csv:1: these are not the columns"):
            use()
    assert path.read_text() == content


EMPTY = "," * (len(COLUMNS) - 2)


@pytest.mark.parametrize("line", [f"2,x{EMPTY}\n", "2,3\n", f",1{EMPTY}\n", f"2.5,1{EMPTY}\n"])
def test_a_row_that_is_none_is_named_by_its_line(path, line):
    MetricsFile(path).append(row(1))
    path.write_text(path.read_text() + line)
    with pytest.raises(UserError, match=r"metrics.csv:3: "):
        MetricsFile(path).read()


def test_a_full_disk_leaves_the_rows_that_were_there():
    with pytest.raises(UserError, match=r"cannot write /dev/full"):
        MetricsFile("/dev/full")._write("1,2\n", 0)
