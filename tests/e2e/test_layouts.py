"""Runs of several ranks: where they may go on, and what is refused before one of them is started."""

import json
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack.cli.main import main
from tests.e2e.job import (
    LAYOUTS,
    TINY,
    callbacks,
    exact_rows,
    finished,
    fit_here,
    lines_of,
    newest,
    rows_of,
    tensors_of,
)

STEPS = ["--trainer.max_steps", "12", "--run.checkpoint_every", "6"]
DROPOUT = ["--model.config.residual_dropout", "0.1"]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "others",
    [["single", "zero3 on 2"], pytest.param(["zero2 on 2", "zero1 on 1", "ddp on 2"], marks=pytest.mark.full)],
    ids=" and ".join,
)
def test_a_run_begun_under_zero2_goes_on_under(others: list[str], tmp_path: Path) -> None:
    """Bit for bit on the same ranks, dropout included; closely elsewhere; and with another batch on other samples."""
    told = callbacks(tmp_path, Record={"folder": str(tmp_path)})
    whole, same = tmp_path / "whole", tmp_path / "same"
    arguments = [*STEPS, *LAYOUTS["zero2 on 2"], *told, *DROPOUT]
    finished(whole, *arguments)
    assert take_samples(tmp_path) == list(range(12 * 4))
    weights = take_weights(tmp_path)
    assert weights[0] == weights[1]

    copy_as_killed_after_six(whole, same)
    assert newest(same).state["samples_seen"] == 6 * 4
    finished(same, *arguments)
    assert exact_rows(same) == exact_rows(whole)
    assert take_samples(tmp_path) == list(range(6 * 4, 12 * 4))
    assert take_weights(tmp_path) == weights
    expected, found = tensors_of(whole), tensors_of(same)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    def go_on_without_dropout(layout: str, *more: str) -> tuple[Path, str]:
        """The run, and what it printed."""
        run = tmp_path / "-".join([*layout.split(), *more])
        copy_as_killed_after_six(whole, run)
        # Part of what a run is, so the copy has to say so itself.
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("residual_dropout: 0.1", "residual_dropout: 0.0"))
        everything = [*STEPS, *LAYOUTS[layout], *told, *more]
        if layout != "single":
            return run, finished(run, *everything).output
        status, output = fit_here(run, *everything)
        assert status == 0, output
        return run, output

    losses = {}
    for layout in others:
        run, output = go_on_without_dropout(layout)
        losses[layout] = [row["loss"] for row in rows_of(run)[6:11]]
        assert take_samples(tmp_path) == list(range(6 * 4, 12 * 4)), layout
        assert "samples, not" not in output, layout
        if layout != "zero3 on 2":
            assert len(set(take_weights(tmp_path))) == 1, layout
    for layout in others[1:]:
        assert losses[layout] == pytest.approx(losses[others[0]], rel=1e-5), layout

    run, output = go_on_without_dropout("single", "--data.micro_batch_size", "3")
    (said,) = [line for line in output.splitlines() if "from here a step has 6 samples, not 4" in line]
    assert "step 6:" in said
    assert said in (run / "logs" / "events.log").read_text()
    seen = 6 * 4 + 6 * 6
    assert newest(run).state["samples_seen"] == seen
    assert take_samples(tmp_path) == list(range(6 * 4, seen))


def copy_as_killed_after_six(whole: Path, run: Path) -> None:
    """What a kill between the checkpoint of step 6 and the end would have left of a run."""
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    (run / "run.json").unlink()


def take_samples(folder: Path) -> list[int]:
    """The samples that all ranks have recorded, in order; the next record starts anew."""
    samples = sorted(chain.from_iterable(chain.from_iterable(lines_of(folder, "samples"))))
    for path in folder.glob("samples-*"):
        path.unlink()
    return samples


def take_weights(folder: Path) -> list[str]:
    """Digest of the weights of each rank at the end of a run."""
    paths = sorted(folder.glob("weights-*"))
    digests = [path.read_text() for path in paths]
    for path in paths:
        path.unlink()
    return digests


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
    # Three steps over 32 tokens each, from another place every time, need not lower the loss; they have to be sound.
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert newest(job.run).step == 3
    assert newest(job.run).state["skipped_steps"] == 0
