"""``scripts/gpu_check.sh`` on the CPU."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmstack.bench import device_check
from llmstack.model.norms.rmsnorm import RMSNorm
from tests.test_rooms import hiding_all_but_torch

ROOT = Path(__file__).parents[2]
SMALL = ("--presets", "tiny", "--seq", "16", "--new-tokens", "4")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs as they are traced, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def results(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_all_checks_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main([*SMALL, "--methods", "rmsnorm,bhyt,peri_ln,fake_ln,dyt"]) == 0
    table, found = results(capsys)
    assert found["failed"] == []
    norms = ["rmsnorm", "bhyt", "peri_ln", *(f"fake_ln ({phase})" for phase in ("norm", "taper", "linear")), "dyt"]
    names = [f"norm {name}" for name in norms] + [
        f"tiny {name}"
        for name in ("training, 2 layers, fp32", "training, bf16", "decoding, 2 layers, fp32", "decoding, bf16")
    ]
    assert [one["check"] for one in found["results"]] == names
    assert all(name in table for name in names)
    for one in found["results"]:
        # Compared, or timed, or both.
        assert one["error"] is None or 0 <= one["error"] <= one["bound"] == device_check.FP32_BOUND
        assert one["speed"] is None or one["speed"] > 0
        assert one["error"] is not None or one["speed"] is not None


def test_what_is_wrong_is_found_and_stops_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = RMSNorm.forward

    def wrong_in_fp32(self: RMSNorm, x: torch.Tensor, *more: object) -> object:
        found = forward(self, x, *more)
        if x.dtype == torch.float64:
            return found
        return (found[0] * 1.001, *found[1:]) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(RMSNorm, "forward", wrong_in_fp32)
    monkeypatch.setattr(device_check, "measure_decoding", lambda *_: 1 / 0)
    assert device_check.main([*SMALL, "--methods", "rmsnorm,dyt"]) == 1
    table, found = results(capsys)
    assert found["failed"] == ["norm rmsnorm", "tiny decoding, bf16"]
    assert "FAILED: error 0.001 above 0.0001" in table
    assert "FAILED: ZeroDivisionError: division by zero" in table


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--presets", "5b"], "5b"),
        (["--methods", "nothing"], "nothing"),
        (["--new-tokens", "1"], "--new-tokens is 1; it must be at least 2"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main([*SMALL, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_torch_alone_is_enough() -> None:
    code = "import llmstack.bench.device_check as check\nsys.exit(check.main(['--presets', '5b']))"
    done = subprocess.run([sys.executable, "-c", hiding_all_but_torch(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "5b" in done.stderr


@pytest.mark.full
def test_the_script_compiles_for_real() -> None:
    environ = {**os.environ, "PYTHON": sys.executable}
    arguments = ["bash", str(ROOT / "scripts/gpu_check.sh"), *SMALL, "--methods", "rmsnorm"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd="/", env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == []
