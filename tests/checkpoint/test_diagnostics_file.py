"""diagnostics.csv: what is written is read back, and a resumed run finds the rows of its own past alone."""

from __future__ import annotations

import csv
import math
import resource
import signal
from pathlib import Path

import pytest

from llmstack.checkpoint import DiagnosticsFile, DiagnosticsRow, RunFolder
from llmstack.errors import UserError


def rows(step: int) -> list[DiagnosticsRow]:
    return [
        DiagnosticsRow(step, 0, "", "stream_rms", 1 / 3 + step),
        DiagnosticsRow(step, 11, "mlp", "variance_pearson", -0.1 - 0.2),
        DiagnosticsRow(step, None, "final", "max_abs_logit", math.inf),
    ]


@pytest.fixture
def file(tmp_path: Path) -> DiagnosticsFile:
    """With the rows of steps 50, 100 and 150."""
    file = DiagnosticsFile(tmp_path / "diagnostics.csv")
    for step in (50, 100, 150):
        file.append(rows(step))
    return file


def test_rows_come_back_to_the_last_bit(file: DiagnosticsFile) -> None:
    assert file.read() == [*rows(50), *rows(100), *rows(150)]
    with file.path.open(newline="") as text:
        first = next(csv.DictReader(text))
    assert first == {"step": "50", "layer": "0", "site": "", "name": "stream_rms", "value": repr(1 / 3 + 50)}


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    file = DiagnosticsFile(tmp_path / "diagnostics.csv")
    file.cut(10)
    assert file.read() == []
    assert not file.path.exists()


@pytest.mark.parametrize(("step", "left"), [(150, 9), (149, 6), (100, 6), (49, 0)])
def test_cut_drops_later_steps(file: DiagnosticsFile, step: int, left: int) -> None:
    file.cut(step)
    assert file.read() == [*rows(50), *rows(100), *rows(150)][:left]
    file.append(rows(200))
    assert file.read()[left:] == rows(200)


def test_an_unfinished_line_is_not_read_and_is_cut(file: DiagnosticsFile) -> None:
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + b"200,0,,stream_rms,12")
    assert file.read() == [*rows(50), *rows(100), *rows(150)]
    file.cut(1000)
    assert file.path.read_bytes() == whole


def test_the_run_folder_cuts_it_with_the_metrics(file: DiagnosticsFile) -> None:
    RunFolder(file.path.parent).cut_metrics(75)
    assert file.read() == rows(50)


@pytest.mark.parametrize("text", ["step,loss\n1,2\n", "step,layer,site,name,value\n1,0,,rms\n", "\n"])
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "diagnostics.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"diagnostics.csv:[12]: "):
        DiagnosticsFile(path).read()


def test_rows_that_do_not_fit_on_the_disk_leave_none_in_part(file: DiagnosticsFile) -> None:
    """The limit on a file's size stands for a full disk: a write goes as far as it can."""
    before = file.path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write"):
            file.append(rows(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.path.read_bytes() == before
