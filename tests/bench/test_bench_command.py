"""``llmstack bench norm`` on a tiny shape."""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmstack.bench.norm import MODES, PASSES, PLACES, variants
from llmstack.cli.main import main

TINY = ("--batch", "2", "--seq", "5", "--hidden", "16", "--repeats", "6")


def check(out: str, methods: list[str] | None) -> dict:
    """Every method in every mode, and figures that follow from one another; the tables name every variant."""
    *tables, last = out.splitlines()
    found = json.loads(last)
    assert (found["shape"], found["repeats"]) == ({"batch": 2, "seq": 5, "hidden": 16}, 6)
    keys = [(r["method"], r["phase"], r["mode"], r["place"], r["pass"]) for r in found["results"]]
    measured = variants(methods)
    assert len(keys) == len(set(keys))
    assert set(keys) == {(*v, *rest) for v in measured for rest in itertools.product(MODES, PLACES, PASSES)}
    for result in found["results"]:
        low, high = result["ratio_interval"]
        assert 0 < low <= result["ratio_to_rmsnorm"] <= high
        assert result["gb_per_second"] == pytest.approx(result["bytes"] / result["median_seconds"] / 1e9)
        assert result["copy_gb_per_second"] > 0
        assert result["share_of_copy"] > 0
    for variant in measured:
        assert sum(line.startswith(f"{variant!s} ") for line in tables) == len(MODES) * len(PLACES)
    return found


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs as they are traced, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("traced_only")
def test_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "norms.json"
    methods = ["rmsnorm", "bhyt", "fake_ln"]
    assert main(["bench", "norm", *TINY, "--methods", ",".join(methods), "--output", str(output)]) == 0
    streams = capsys.readouterr()
    found = check(streams.out, methods)
    assert found["dtype"] == "bfloat16"
    assert json.loads(output.read_text()) == found
    assert "5/5 fake_ln (linear)" in streams.err


@pytest.mark.full  # compiles for minutes
@pytest.mark.timeout(1000)
def test_every_method_really_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmstack", "bench", "norm", *TINY, "--dtype", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    check(done.stdout, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "rmsnorm,nonorm"], "--methods nonorm: unknown method (there are: bhyt, "),
        (["--methods", ""], "unknown method"),
        (["--methods", "by_layer"], "mixture of other methods"),
        (["--batch", "0"], "--batch is 0"),
        (["--hidden", "-1"], "--hidden is -1"),
        (["--repeats", "5"], "--repeats is 5; an interval needs at least 6"),
        (["--preset", "7b"], "no model preset '7b'"),
        (["--preset", "1b", "--hidden", "8"], "not allowed with"),
        (["--dtype", "int8"], "invalid choice"),
        (["--output", "/nowhere/at/all.json"], "there is no such folder"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "norm", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_bench_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert main(["bench", "nothing"]) == 2
    assert "norm" in capsys.readouterr().err.splitlines()[-1]


def test_help_gives_defaults_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "norm", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in ("GB/s", "default: 16 on a GPU, 2 on a CPU", "default: 1024", "default: 374m", "at least 6"):
        assert expected in text
