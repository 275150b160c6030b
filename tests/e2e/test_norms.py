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


def option(name: str, value: object) -> list[str]:
    return [f"--model.config.norm.{name}", str(value)]


REMOVALS = ("start_mlp", "start_qk", "start_v", "start_final", "gap_mlp", "gap_qk", "gap_v")
TAPERS = ("tapernorm_internal", "tapernorm_all", "taperln_internal", "taperln_all")
LIVES = {
    "fake_ln": [word for name in REMOVALS for word in option(name, 1)],
    **{name: [*option("taper_start", 0.3), *option("taper_end", 0.7)] for name in TAPERS},
}
LIVES["taperln_all"] += ["--model.optimizer.lr", "5e-4"]  # logits that nothing bounds: at 1e-3 they overshoot
"""All of a life within thirty steps."""

CALM = [
    *("--model.config.mlp", "gelu", "--model.config.initialisation", "normal", "--model.optimizer.lr", "1e-3"),
    *("--model.config.num_layers", "16", "--data.micro_batch_size", "2"),
]
"""Through 16 layers without norms, two factors that grow with the stream (SwiGLU's) would blow up before they learn."""

CI = ("tapernorm_all",)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """All blocks share one piece of code, of which a process compiles eight versions at most."""
    torch._dynamo.reset()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "norm", [norm if norm in CI else pytest.param(norm, marks=pytest.mark.full) for norm in METHODS]
)
def test_a_norm_trains_compiled_folds_and_generates(norm: str, tmp_path: Path) -> None:
    """Thirty steps of 16 layers; the folded model continues a prompt as the trained one does."""
    run = tmp_path / "run"
    short = ["--trainer.max_steps", "30", "--run.validate_every", "null", "--run.checkpoint_every", "null"]
    arguments = ["-c", "quickstart.yaml", "-c", f"norm/{norm}.yaml", *CALM, *short, *LIVES.get(norm, [])]
    assert main(["fit", *arguments, "--run.dir", str(run)]) == 0
    losses = [row["loss"] for row in rows_of(run)]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.2
    model = load_model(run)
    folded = fold(model)
    prompt = list(range(5, 12))
    expected = list(Generator(model, 40).stream(prompt, 20))
    assert list(Generator(folded, 40).stream(prompt, 20)) == expected
    gains = [weight for name, weight in model.named_parameters() if name.endswith("norm.weight")]
    assert max(float((gain.detach() - 1).abs().max()) for gain in gains) > 5e-3, "they were meant to have moved"
