"""Runs of several ranks: where they may go on, and what is refused before one of them is started."""

import json
import math
import shutil
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack.cli.main import main
from tests.e2e.job import LAYOUTS, TINY, Job, callbacks, exact_rows, finished, lines_of, newest, rows_of, tensors_of

STEPS = ["--trainer.max_steps", "12", "--run.checkpoint_every", "4"]
DROPOUT = ["--model.config.residual_dropout", "0.1"]
STOPPED_AT = 6


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "others",
    [["zero3 on 2", "single"], pytest.param(["zero1 on 1", "ddp on 2"], marks=pytest.mark.full)],
    ids=" and ".join,
)
def test_a_run_stopped_under_zero2_goes_on_under(others: list[str], tmp_path: Path) -> None:
    """Bit for bit on the same ranks, dropout included; closely elsewhere; and with another batch on other samples."""
    told = callbacks(
        tmp_path, Orders={"folder": str(tmp_path), "hold_at": STOPPED_AT}, Record={"folder": str(tmp_path)}
    )
    same = [*STEPS, *LAYOUTS["zero2 on 2"], *told]
    finished(tmp_path / "whole", *same, *DROPOUT)
    assert forget_samples(tmp_path) == list(range(4 * 12))
    weights = [(tmp_path / f"weights-{rank}").read_text() for rank in (0, 1)]
    assert weights[0] == weights[1]

    start = tmp_path / "start"
    stop_at_hold(start, *same, *DROPOUT)
    seen_before = forget_samples(tmp_path)
    assert newest(start).step == STOPPED_AT
    assert newest(start).state["samples_seen"] == len(seen_before) == 4 * STOPPED_AT

    shutil.copytree(start, tmp_path / "same")
    finished(tmp_path / "same", *same, *DROPOUT)
    assert exact_rows(tmp_path / "same") == exact_rows(tmp_path / "whole")
    assert [(tmp_path / f"weights-{rank}").read_text() for rank in (0, 1)] == weights
    whole, resumed = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "same")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert seen_before + forget_samples(tmp_path) == list(range(4 * 12))

    def without_dropout(name: str, *arguments: str) -> tuple[list[float], Job]:
        run = tmp_path / name
        shutil.copytree(start, run)
        # Part of what a run is, so the copy has to say so itself.
        text = (run / "config.yaml").read_text().replace("residual_dropout: 0.1", "residual_dropout: 0.0")
        (run / "config.yaml").write_text(text)
        job = finished(run, *STEPS, *told, *arguments)
        return [row["loss"] for row in rows_of(run)][STOPPED_AT : STOPPED_AT + 5], job

    expected, _ = without_dropout("reference", *LAYOUTS["zero2 on 2"])
    for layout in others:
        forget_samples(tmp_path)
        losses, job = without_dropout(layout.replace(" ", "-"), *LAYOUTS[layout])
        assert losses == pytest.approx(expected, rel=1e-5), layout
        assert forget_samples(tmp_path) == list(range(4 * STOPPED_AT, 4 * 12)), layout
        assert "samples, not" not in job.output

    _, job = without_dropout("larger-batch", *LAYOUTS["single"], "--data.micro_batch_size", "3")
    (said,) = job.said("from here a step has 6 samples, not 4")
    assert f"step {STOPPED_AT}:" in said
    assert said in (job.run / "logs" / "events.log").read_text()
    seen = 4 * STOPPED_AT + 6 * (12 - STOPPED_AT)
    assert newest(job.run).state["samples_seen"] == seen
    assert forget_samples(tmp_path) == list(range(4 * STOPPED_AT, seen))


def stop_at_hold(run: Path, *arguments: str) -> None:
    """SIGTERM while the ranks wait at a step: all stop after it, saved, and one says so."""
    hold = run.parent / "hold"
    hold.touch()
    with Job(run, *arguments) as job:
        job.wait_for(lambda: all(at(run.parent, rank) == STOPPED_AT for rank in (0, 1)))
        job.process.send_signal(signal.SIGTERM)
        job.wait_for(lambda: job.said("SIGTERM"))
        hold.unlink()
        assert job.end() == 143, job.output
    assert len(job.said("SIGTERM")) == 1
    assert len(job.said(f"is saved at step {STOPPED_AT} of 12; the same command continues it")) == 1
    assert "Traceback" not in job.output


def at(folder: Path, rank: int) -> int:
    path = folder / f"at-{rank}"
    return int(path.read_text() or 0) if path.exists() else 0


def forget_samples(folder: Path) -> list[int]:
    """The samples that were recorded, in order; the next record starts anew."""
    samples = sorted(chain.from_iterable(chain.from_iterable(lines_of(folder, "samples"))))
    for path in folder.glob("samples-*"):
        path.unlink()
    return samples


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """``refused(*arguments)`` -> the one line of a ``fit`` that exits with 2 before a run folder or a rank exists."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        capfd.readouterr()
        assert main(["fit", *TINY, *STEPS, "--run.dir", "run", *arguments]) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("llmstack: ")
        assert not (tmp_path / "run").exists()
        return lines[0]

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("layout", ["zero2 on 2", "ddp on 2", "single"])
def test_a_gpu_that_is_not_there_is_not_replaced(refused: Any, layout: str) -> None:
    assert "gpu" in refused(*LAYOUTS[layout], "--trainer.accelerator", "gpu").lower()


def test_several_devices_need_to_be_told_how(refused: Any) -> None:
    assert "trainer/ddp.yaml" in refused(*LAYOUTS["single"], "--trainer.devices", "2")


def test_the_strategies_of_the_library_are_not_ours(refused: Any) -> None:
    for name in ("ddp", "deepspeed_stage_2", "fsdp"):
        line = refused(*LAYOUTS["single"], "--trainer.devices", "2", "--trainer.strategy", name)
        assert all(word in line for word in (name, "trainer/ddp.yaml", "zero2.yaml"))


CONTRADICTIONS = [
    ("train_batch_size", {"train_batch_size": 4}, "data.micro_batch_size"),
    ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": 3}, "data.micro_batch_size"),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 8}, "trainer.accumulate_grad_batches"),
    ("gradient_clipping", {"gradient_clipping": 0.5}, "trainer.gradient_clip_val"),
    ("bf16.enabled", {"bf16": {"enabled": True}}, "trainer.precision"),
    ("fp16", {"fp16": {"enabled": True}}, "trainer.precision"),
    ("optimizer", {"optimizer": {"type": "Adam"}}, "model.optimizer"),
    ("scheduler", {"scheduler": {"type": "WarmupLR"}}, "model.optimizer"),
    ("zero_optimization.stage", {"zero_optimization": {"stage": 3}}, "strategy"),
    ("zero_optimization.offload_optimizer", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload"),
]


@pytest.mark.parametrize(("setting", "content", "owner"), CONTRADICTIONS, ids=[case[0] for case in CONTRADICTIONS])
def test_a_contradicting_deepspeed_file_is_refused(
    refused: Any, tmp_path: Path, setting: str, content: dict[str, Any], owner: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(content))
    line = refused(*LAYOUTS["zero2 on 2"], "--trainer.strategy.init_args.config", "ds.json")
    assert setting in line
    assert owner in line


def test_a_deepspeed_file_that_agrees_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Saying the same twice is no fault: what stops this run is found later."""
    monkeypatch.chdir(tmp_path)
    agreeing = {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Path("ds.json").write_text(json.dumps(agreeing))
    Path("run").mkdir()
    Path("run/thesis.tex").touch()
    arguments = [*LAYOUTS["zero2 on 2"], "--trainer.strategy.init_args.config", "ds.json", "--run.dir", "run"]
    assert main(["fit", *TINY, *STEPS, *arguments]) == 2
    assert "thesis.tex" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_production_configuration_is_the_one_that_runs_here(tmp_path: Path) -> None:
    """The 374m model under ``trainer/zero2.yaml`` as it is, bf16 and all, on two CPU ranks; only the block is short."""
    files = ["model/374m.yaml", "norm/bhyt.yaml", "data/embedded.yaml", "trainer/zero2.yaml"]
    short = ["--data.block_size", "16", "--data.micro_batch_size", "1", "--trainer.max_steps", "3"]
    unsaved = ["--run.checkpoint_every", "null", "--run.validate_every", "null"]
    arguments = [*chain.from_iterable(("-c", file) for file in files), *short, *unsaved, "--trainer.devices", "2"]
    job = finished(tmp_path / "run", *arguments, base=[], timeout=3000)
    (line,) = job.said("ZeRO-2 on 2 CPU ranks over gloo (no GPU here), bf16-mixed: 2 samples a step")
    assert line
    losses = [row["loss"] for row in rows_of(job.run)]
    assert losses[0] == pytest.approx(math.log(128256), rel=0.05)
    assert losses[2] < losses[0]
    assert newest(job.run).step == 3
