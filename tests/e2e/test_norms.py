"""Every norm as a user meets it: its file over the quickstart's, trained, folded, generating."""

from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import load_model
from llmstack.cli.main import main
from llmstack.inference import Generator
from llmstack.model.norms import METHODS
from llmstack.model.norms.fold import fold
from tests.e2e.job import rows_of

FASTER = ("start_mlp", "start_qk", "start_v", "start_final", "gap_mlp", "gap_qk", "gap_v")
CI = ("tapernorm_all",)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "norm", [norm if norm in CI else pytest.param(norm, marks=pytest.mark.full) for norm in METHODS]
)
def test_a_norm_trains_compiled_folds_and_generates(norm: str, tmp_path: Path) -> None:
    """Thirty steps of 16 layers; the folded model continues a prompt as the trained one does."""
    run = tmp_path / "run"
    deep = ["--model.config.num_layers", "16", "--model.compile", "true", "--data.micro_batch_size", "2"]
    short = ["--trainer.max_steps", "30", "--run.validate_every", "null", "--run.checkpoint_every", "null"]
    options = [word for name in FASTER for word in (f"--model.config.norm.{name}", "1")] if norm == "fake_ln" else []
    arguments = ["-c", "quickstart.yaml", "-c", f"norm/{norm}.yaml", *deep, *short, *options]
    assert main(["fit", *arguments, "--run.dir", str(run)]) == 0
    losses = [row["loss"] for row in rows_of(run)]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3
    model = load_model(run)
    folded = fold(model)
    prompt = list(range(5, 12))
    expected = list(Generator(model, 40).stream(prompt, 20))
    assert list(Generator(folded, 40).stream(prompt, 20)) == expected
    moved = [(weight - 1).abs().max() for name, weight in model.named_parameters() if name.endswith("norm.weight")]
    assert torch.stack(moved).max() > 1e-2, "the gains were meant to have moved"
