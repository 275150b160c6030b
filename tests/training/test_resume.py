"""A resumed run is the uninterrupted one: bit for bit on the same kernels, closely on others."""

import shutil
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import MetricsFile, read_checkpoint
from llmstack.model.norms.bhyt import PUBLISHED_TRAIN_LENGTH
from tests.training.conftest import Fit

DROPOUT = (
    *("--model.config.residual_dropout", "0.2", "--model.config.residual_dropout_schedule", "linear"),
    *("--model.config.embedding_dropout", "0.1"),
)
TEN_STEPS = ("--trainer.max_steps", "10", "--run.checkpoint_every", "5", "--trainer.accumulate_grad_batches", "2")
EXACT = ("step", "tokens_seen", "loss", "learning_rate", "grad_norm", "val_loss", "val_perplexity", "val_tokens")


def stop_at_five(whole: Path, part: Path) -> None:
    """What a kill after the checkpoint of step 5 leaves of a run of ten steps: later rows are there already."""
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step-00000010")
    (part / "run.json").unlink()


def rows(run: Path, columns: tuple[str, ...] = EXACT) -> list[list[float | None]]:
    return [[row[column] for column in columns] for row in MetricsFile(run / "metrics.csv").read()]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = read_checkpoint(run / "checkpoints" / f"step-{step:08d}")
    return {**checkpoint.weights(), **checkpoint.optimizer()}


def contents(run: Path) -> dict[Path, bytes]:
    """Every file but the lock, which names its last holder."""
    return {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_five_and_five_steps_are_ten_bit_for_bit(fit: Fit, tmp_path: Path, compile: bool) -> None:
    """Weights, statistics, optimiser state, losses, norms and tokens, with residual and embedding dropout on."""
    assert fit("whole", *TEN_STEPS, *DROPOUT, compile=compile) == 0
    stop_at_five(tmp_path / "whole", tmp_path / "parts")
    assert fit("parts", *TEN_STEPS, *DROPOUT, compile=compile) == 0
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    whole, parts = tensors(tmp_path / "whole", 10), tensors(tmp_path / "parts", 10)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [row[0] for row in rows(tmp_path / "parts")] == list(range(1, 11))


def taper(start: str, end: str) -> tuple[str, ...]:
    return ("--model.config.norm.taper_start", start, "--model.config.norm.taper_end", end)


LIVES = {
    "calibrating": ("-c", "norm/tapernorm_all.yaml", *taper("0.7", "0.9")),
    "tapering": ("-c", "norm/tapernorm_all.yaml", *taper("0.2", "0.8")),
    "tapering with means": ("-c", "norm/taperln_all.yaml", *taper("0.2", "0.8")),
    "half removed": (
        *("-c", "norm/fake_ln.yaml", "--model.config.norm.start_mlp", "2", "--model.config.norm.start_qk", "4"),
        *("--model.config.norm.start_v", "5", "--model.config.norm.start_final", "9"),
    ),
    "first token apart": (
        *("-c", "norm/fake_ln.yaml", "--model.config.norm.start_mlp", "2", "--model.config.norm.start_qk", "3"),
        *("--model.config.norm.start_v", "2", "--model.config.norm.gap_v", "1", "--model.config.norm.start_final", "4"),
        *("--model.config.norm.first_token", "true", "--model.config.norm.start_merge", "7"),
    ),
}
"""What a norm may be doing when a run is stopped after five of its ten steps."""


@pytest.mark.parametrize("life", LIVES)
def test_a_norm_goes_on_with_what_it_was_doing(fit: Fit, tmp_path: Path, life: str) -> None:
    """Averages, constants, gates and losses, bit for bit."""
    arguments = (*LIVES[life], *TEN_STEPS)
    assert fit("whole", *arguments) == 0
    stop_at_five(tmp_path / "whole", tmp_path / "parts")
    assert fit("parts", *arguments) == 0
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    whole, parts = tensors(tmp_path / "whole", 10), tensors(tmp_path / "parts", 10)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    at_work = [name for name in whole if name.endswith((".gate", ".total", "scale"))]
    halfway = tensors(tmp_path / "whole", 5)
    assert any(not torch.equal(halfway[name], whole[name]) for name in at_work)


@pytest.mark.parametrize("norm", ["tapernorm_all", "fake_ln"])
def test_statistics_are_the_same_with_activation_checkpointing(fit: Fit, tmp_path: Path, norm: str) -> None:
    """Nothing is measured twice in a block that is computed twice."""
    arguments = (*LIVES["calibrating" if norm == "tapernorm_all" else "half removed"], *TEN_STEPS)
    for name in ("none", "full"):
        assert fit(name, *arguments, "--model.activation_checkpointing", name) == 0
    kept, recomputed = tensors(tmp_path / "none", 10), tensors(tmp_path / "full", 10)
    statistics = [name for name in kept if name.endswith((".c", ".scale", ".total", ".target"))]
    assert len(statistics) > 8
    assert all(torch.equal(kept[name], recomputed[name]) for name in statistics)


def test_compiled_to_eager_restores_bit_equal_and_goes_on_alike(fit: Fit, tmp_path: Path) -> None:
    """`model.compile` is part of the configuration, so the eager continuation is a run folder made to say so."""
    assert fit("compiled", *TEN_STEPS, compile=True) == 0
    stop_at_five(tmp_path / "compiled", tmp_path / "eager")
    config = tmp_path / "eager" / "config.yaml"
    config.write_text(config.read_text().replace("compile: true", "compile: false"))
    before = tensors(tmp_path / "eager", 5)
    assert fit("eager", *TEN_STEPS, compile=False) == 0
    again = tensors(tmp_path / "eager", 5)
    assert all(torch.equal(before[name], again[name]) for name in before)
    for eager, compiled in zip(rows(tmp_path / "eager"), rows(tmp_path / "compiled"), strict=True):
        assert eager[2] == pytest.approx(compiled[2], abs=1e-5)


def test_the_rest_of_a_run_depends_on_the_restored_state(fit: Fit, tmp_path: Path) -> None:
    """The comparison above would notice: a run resumed from other weights does not end with the same losses."""
    assert fit("whole", *TEN_STEPS) == 0
    assert fit("other", *TEN_STEPS, "--seed_everything", "1") == 0
    assert rows(tmp_path / "whole")[-1][2] != rows(tmp_path / "other")[-1][2]


def test_a_finished_run_says_so_and_is_left_alone(fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("run", "--trainer.max_steps", "2") == 0
    before = contents(tmp_path / "run")
    capsys.readouterr()
    assert fit("run", "--trainer.max_steps", "2") == 0
    assert "finished" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before


def test_another_configuration_is_refused(fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("run", "--trainer.max_steps", "2") == 0
    assert fit("run", "--trainer.max_steps", "2", "--model.optimizer.lr", "0.5") == 2
    assert "model.optimizer.lr" in capsys.readouterr().err


def test_a_broken_newest_checkpoint_gives_way_to_the_one_before(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fit("whole", *TEN_STEPS) == 0
    run = tmp_path / "parts"
    shutil.copytree(tmp_path / "whole", run)
    (run / "run.json").unlink()
    broken = run / "checkpoints" / "step-00000010" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    assert fit("parts", *TEN_STEPS) == 0
    assert "step-00000010" in caplog.text
    assert rows(run) == rows(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["missing", "cut", "gap", "doubled"])
def test_a_record_with_holes_is_not_continued(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """metrics.csv must hold each step up to the checkpoint once; a run would otherwise go on from a false record."""
    assert fit("whole", *TEN_STEPS) == 0
    stop_at_five(tmp_path / "whole", tmp_path / "parts")
    path = tmp_path / "parts" / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    damaged = {"missing": [], "cut": lines[:3], "gap": lines[:3] + lines[4:], "doubled": [*lines[:4], *lines[3:]]}
    path.write_text("".join(damaged[damage])) if damage != "missing" else path.unlink()
    capsys.readouterr()
    assert fit("parts", *TEN_STEPS) == 2
    assert "metrics.csv" in capsys.readouterr().err


def test_a_damaged_copy_of_the_tokenizer_is_written_anew(fit: Fit, tmp_path: Path) -> None:
    assert fit("whole", *TEN_STEPS) == 0
    stop_at_five(tmp_path / "whole", tmp_path / "parts")
    for path in (tmp_path / "parts" / "tokenizer").iterdir():
        path.write_text("{}")
    assert fit("parts", *TEN_STEPS) == 0
    copies = [tmp_path / name / "checkpoints" / "step-00000010" / "tokenizer" for name in ("whole", "parts")]
    assert [path.name for path in sorted(copies[0].iterdir())] == [path.name for path in sorted(copies[1].iterdir())]
    assert all(path.read_bytes() == (copies[1] / path.name).read_bytes() for path in copies[0].iterdir())


def test_gradients_that_stay_not_finite_end_the_run(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rate of 1e30 no step after the first has any other; the run is saved as it was after that."""
    options = ("--model.optimizer.lr", "1e30", "--model.optimizer.warmup_ratio", "0", "--run.abort_after_skipped", "3")
    assert fit("run", "--trainer.max_steps", "10", *options) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "step 2 skipped: its gradient is not finite" in line]) == 3
    assert "3 steps in a row had no finite gradient" in lines[-1]
    assert "saved at step 1 of 10" in lines[-1]
    run = tmp_path / "run"
    assert not (run / "run.json").exists()
    assert [row[0] for row in rows(run)] == [1]
    state = read_checkpoint(run / "checkpoints" / "step-00000001").state
    assert (state["skipped_steps"], state["samples_seen"]) == (3, 4 * 4)


def test_c_attn_is_that_of_the_saved_weights_and_the_block_length(fit: Fit, tmp_path: Path) -> None:
    """At 10 steps it is refreshed after each; 32-token blocks make T = 32, not the published 1024."""
    assert fit("run", *TEN_STEPS) == 0
    weights = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000010").weights()
    for layer in range(2):
        value = weights[f"layers.{layer}.attention.v_proj.weight"]
        output = weights[f"layers.{layer}.attention.o_proj.weight"]
        expanded = value.view(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)  # 4 heads, 2 kv heads of 16
        expected = (output @ expanded).pow(2).sum() / (32 * 64)
        assert weights[f"layers.{layer}.attention_norm.c_attn"] == pytest.approx(float(expected), rel=1e-5)
        assert int(weights[f"layers.{layer}.attention_norm.train_length"]) == 32 != PUBLISHED_TRAIN_LENGTH
