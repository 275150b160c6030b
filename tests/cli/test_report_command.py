"""``llmstack report``: what it prints, where its files go, and how wrong input ends."""

import json
from pathlib import Path

import pytest
import yaml

from llmstack.checkpoint import MetricsRow, RunFolder
from llmstack.cli.main import main


def make_run(path: Path, norm: str, loss: float) -> Path:
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.config_path.write_text(yaml.safe_dump({"model": {"config": {"norm": {"method": norm}}, "seed": 0}}))
    for step in (1, 2):
        run.metrics.append(
            MetricsRow(step, 10 * step, 3.0, 1e-3, 1.0, tokens_per_second=5.0, val_loss=loss, val_tokens=7)
        )
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "rms", "rmsnorm", 2.0), make_run(tmp_path / "bhyt", "bhyt", 1.9)]


def test_it_prints_the_losses_and_where_the_page_is(runs: list[Path], tmp_path: Path, capsys):
    out = tmp_path / "deep" / "report"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "rms   best validation loss 2.0000",
        "bhyt  best validation loss 1.9000 (-5.00 %)",
        str(out / "report.html"),
    ]
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("by", ["name", "path"])
def test_another_baseline_turns_the_gaps(runs: list[Path], tmp_path: Path, by: str):
    wanted = "bhyt" if by == "name" else f"{runs[1]}/"
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out"), "--baseline", wanted]) == 0
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert numbers["baseline"] == "bhyt"
    assert [round(row["best_gap"]["nats"], 9) for row in numbers["runs"]] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{rms}", "{rms}", "--out", "{new}"], "given twice"),
        (["{rms}", "{nothing}", "--out", "{new}"], "there is no such run folder"),
        (["{empty}", "--out", "{new}"], "has no rows"),
        (["{rms}", "--out", "{rms}"], "holds other things than a report"),
        (["{rms}", "--out", "{rms}/config.yaml"], "is a file"),
        (["{rms}", "--out", "{new}", "--baseline", "bhyt"], "--baseline bhyt is none of the runs: rms"),
        (["{rms}"], "--out"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    runs: list[Path], tmp_path: Path, capsys, arguments: list[str], message: str
):
    places = {name: str(tmp_path / name) for name in ("rms", "nothing", "empty", "new")}
    (tmp_path / "empty").mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert main(["report", *(argument.format(**places) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
