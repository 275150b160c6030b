"""``llmstack plan`` on a configuration whose data is nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmstack.accounting import Layout, training_memory
from llmstack.cli.main import main
from llmstack.model import ModelConfig

PLANNED = [
    *("plan", "-c", "model/tiny.yaml", "-c", "norm/bhyt.yaml", "-c", "data/c4.yaml", "-c", "trainer/zero2.yaml"),
    *("--model.config.vocab_size", "1024", "--model.compile", "false", "--tokens", "1e6"),
    *("--nodes", "2", "--gpus-per-node", "4"),
]


def test_the_plan_is_that_of_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No folder of data, no tokenizer, no GPU."""
    output = tmp_path / "plan.json"
    assert main([*PLANNED, "--trainer.accumulate_grad_batches", "2", "--output", str(output)]) == 0
    plan, text = json.loads(output.read_text()), capsys.readouterr().out
    config = ModelConfig.preset("tiny", vocab_size=1024, norm={"method": "bhyt"})
    layout = Layout(2, 8, False, 8, 1024, 2, "bf16-mixed", "none", False)
    expected = training_memory(config, layout)
    moments = plan["memory"]["moments"]
    assert {name: moment["total"] for name, moment in moments.items()} == {
        name: terms.total for name, terms in expected.moments.items()
    }
    assert plan["run"]["steps"] == -(-(10**6) // (8 * 8 * 1024 * 2))
    assert plan["run"]["checkpoints"] == 5
    assert [one["gpus"] for one in plan["scaling"]["ZeRO-3"]] == [2**power for power in range(11)]
    assert max(len(line) for line in text.splitlines()) <= 120
    for line in ("ZeRO-2, bf16-mixed, 2 x 4 H100 80GB HBM3", "gradients, all-reduce x 2", "5 % lost to fragmentation"):
        assert line in text
    assert all(line in text for line in plan["assumptions"])


def test_what_cannot_fit_is_refused_with_the_change_that_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    assert main([*PLANNED, "--output", str(output)]) == 0
    memory = json.loads(output.read_text())["memory"]
    needed = memory["moments"][memory["peak_moment"]]["total"] / 2**30
    output.unlink()
    capsys.readouterr()
    assert main([*PLANNED, "--gpu-memory-gib", f"{needed - 0.01:.3f}", "--output", str(output)]) == 2
    out, err = capsys.readouterr()
    refusal = err.splitlines()[-1]
    assert refusal.startswith(f"llmstack: the run needs {needed:.1f} GiB of H100 80GB HBM3 (in its ")
    assert "it fits with model.activation_checkpointing selective" in refusal
    assert not out
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "H1000"], "no GPU 'H1000'"),
        (["--nodes", "0"], "whole number of at least 1"),
        (["--efficiency", "1.2"], "at most 1"),
        (["--model.config.vocab_size", "null"], "give --model.config.vocab_size N"),
        (["--data.block_size", "5000"], "longer than model.config.max_position_embeddings"),
        (["--data.micro_batch_size", "0"], "micro_batch_size is 0"),
        (["--trainer.strategy", "auto"], "add -c trainer/ddp.yaml"),
        (["--bench", "/nowhere.json"], "no such file"),
        (["--output", "/nowhere/plan.json"], "no such folder"),
        (["--gpu-memory", "3"], "gpu-memory"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLANNED, *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
