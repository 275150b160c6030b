"""What a run computes: losses, norms and validation against plain formulas."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llmstack.checkpoint import MetricsFile, load_model
from llmstack.data import EMBEDDED, PackedBlocks, SampleOrder, prepare_source
from llmstack.data.embedded import embedded_tokenizer
from llmstack.tokenizer import BosEosPolicy
from tests.training.conftest import Fit


def read(run: Path) -> list[dict[str, float]]:
    return MetricsFile(run / "metrics.csv").read()


def test_accumulation_changes_nothing_but_rounding(fit: Fit, tmp_path: Path) -> None:
    """8 samples at once or 2 at a time: the same losses, gradient norms before clipping, and tokens."""
    steps = ("--trainer.max_steps", "4", "--trainer.gradient_clip_val", "0.1")
    assert fit("one", *steps, "--data.micro_batch_size", "8") == 0
    assert fit("four", *steps, "--data.micro_batch_size", "2", "--trainer.accumulate_grad_batches", "4") == 0
    for one, four in zip(read(tmp_path / "one"), read(tmp_path / "four"), strict=True):
        assert four["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert four["grad_norm"] > 0.1
        assert four["tokens_seen"] == one["tokens_seen"] == 8 * 32 * one["step"]


def test_the_generated_tasks_count_their_valid_tokens(fit: Fit, tmp_path: Path) -> None:
    """Labels differ in number between micro-batches; the loss of a step is still the mean over all of its tokens."""
    arguments = ("-c", "data/sort.yaml", "--trainer.max_steps", "3", "--model.config.vocab_size", "64")
    assert fit("one", *arguments, "--data.micro_batch_size", "8") == 0
    assert fit("four", *arguments, "--data.micro_batch_size", "2", "--trainer.accumulate_grad_batches", "4") == 0
    for one, four in zip(read(tmp_path / "one"), read(tmp_path / "four"), strict=True):
        assert four["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert four["tokens_seen"] == one["tokens_seen"] < 8 * 34 * one["step"]


def test_first_loss_and_validation_are_the_plain_formula(fit: Fit, tmp_path: Path) -> None:
    """Cross-entropy of full logits over the samples the order names, and over all held-out tokens but the first."""
    arguments = ("--trainer.max_steps", "1", "--model.optimizer.lr", "1e-12", "--run.validate_every", "1")
    assert fit("run", *arguments) == 0
    row = read(tmp_path / "run")[0]
    model = load_model(tmp_path / "run")
    tokenizer = embedded_tokenizer(512)
    data = prepare_source(EMBEDDED, tokenizer, BosEosPolicy.default(tokenizer))

    def loss(blocks: PackedBlocks, indices: list[int]) -> tuple[float, int]:
        samples = [blocks[index] for index in indices]
        with torch.no_grad():
            logits = model(torch.stack([sample["input_ids"] for sample in samples]))
        labels = torch.stack([sample["labels"] for sample in samples])
        total = F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100, reduction="sum")
        return float(total), int((labels != -100).sum())

    train = PackedBlocks(data, "train", 32)
    total, count = loss(train, [int(SampleOrder(len(train), 0)(torch.tensor([i]).numpy())[0]) for i in range(4)])
    assert row["loss"] == pytest.approx(total / count, abs=1e-5)
    heldout = PackedBlocks(data, "heldout", 32, keep_last=True)
    parts = [loss(heldout, [index]) for index in range(len(heldout))]
    assert row["val_tokens"] == sum(count for _, count in parts) == data["heldout"].num_tokens - 1
    assert row["val_loss"] == pytest.approx(sum(total for total, _ in parts) / row["val_tokens"], abs=1e-5)


def test_bf16_trains_like_fp32_over_fp32_weights(fit: Fit, tmp_path: Path) -> None:
    steps = ("--trainer.max_steps", "8")
    assert fit("fp32", *steps) == 0
    assert fit("bf16", *steps, "--trainer.precision", "bf16-mixed") == 0
    for full, low in zip(read(tmp_path / "fp32"), read(tmp_path / "bf16"), strict=True):
        assert low["loss"] == pytest.approx(full["loss"], rel=0.01)
        assert low["loss"] != full["loss"]
    assert {parameter.dtype for parameter in load_model(tmp_path / "bf16").parameters()} == {torch.float32}


def test_training_goes_on_from_the_weights_of_another_run(fit: Fit, tmp_path: Path) -> None:
    assert fit("first", "--trainer.max_steps", "5", "--run.validate_every", "5") == 0
    assert fit("second", "--trainer.max_steps", "1", "--model.init_from", str(tmp_path / "first")) == 0
    first = load_model(tmp_path / "first")
    assert read(tmp_path / "second")[0]["loss"] < read(tmp_path / "first")[0]["loss"]
    assert set(first.state_dict()) == set(load_model(tmp_path / "second").state_dict())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rmsnorm", "tapernorm_internal"),
        ("rmsnorm", "tapernorm_all"),
        ("layernorm", "taperln_all"),
        ("layernorm", "fake_ln"),
    ],
)
def test_a_norm_that_will_be_removed_takes_over_the_weights_of_the_norm(
    fit: Fit, tmp_path: Path, before: str, after: str
) -> None:
    """The first loss is what the trained model has on those samples, to the last bit, and the removal follows."""
    norm = "--model.config.norm"
    assert fit("first", "-c", f"norm/{before}.yaml", "--trainer.max_steps", "5") == 0
    steps = ("--trainer.max_steps", "8", "--model.init_from", str(tmp_path / "first"))
    faster = ("start_mlp", "start_qk", "start_v", "start_final") if after == "fake_ln" else ()
    options = [word for name in faster for word in (f"{norm}.{name}", "2")]
    assert fit("same", "-c", f"norm/{before}.yaml", *steps) == 0
    assert fit("second", "-c", f"norm/{after}.yaml", *steps, *options) == 0
    same, second = read(tmp_path / "same"), read(tmp_path / "second")
    if after == "fake_ln":
        assert second[0]["loss"] == pytest.approx(same[0]["loss"], rel=1e-6)
    else:
        assert second[0]["loss"] == same[0]["loss"]
    assert second[-1]["loss"] != same[-1]["loss"]
    method = (model := load_model(tmp_path / "second")).config.norm_method
    sites = [site for site, _ in method.sites(model).values()] if after == "fake_ln" else method.sites(model).values()
    assert all(site.is_linear if after == "fake_ln" else site.phase == "linear" for site in sites)


@pytest.mark.parametrize(
    ("option", "value"), [("mlp", "gelu"), ("score_scaling", "false"), ("num_heads", "2"), ("rope_theta", "500000")]
)
def test_weights_that_would_mean_something_else_are_refused(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    """Where names and shapes of all tensors are the same."""
    plain = ("--model.config.mlp", "relu", "--model.config.head_dim", "16", "--model.config.num_heads", "4")
    assert fit("first", *plain, "--trainer.max_steps", "1") == 0
    capsys.readouterr()
    start = ("--trainer.max_steps", "2", "--model.init_from", str(tmp_path / "first"))
    change = (f"--model.config.{option}", value)
    change += ("--model.config.head_dim", "32", "--model.config.num_kv_heads", "1") if option == "num_heads" else ()
    assert fit("second", *plain, *change, *start) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"was trained with {option}" in line


@pytest.mark.parametrize(
    ("before", "after"),
    [("rmsnorm", "taperln_all"), ("lns", "tapernorm_all"), ("rmsnorm", "fake_ln"), ("lns", "rmsnorm")],
)
def test_another_norm_than_the_one_to_be_removed_is_refused(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str
) -> None:
    """Also where the tensors have the same names and shapes."""
    assert fit("first", "-c", f"norm/{before}.yaml", "--trainer.max_steps", "1") == 0
    capsys.readouterr()
    arguments = ("--trainer.max_steps", "2", "--model.init_from", str(tmp_path / "first"))
    assert fit("second", "-c", f"norm/{after}.yaml", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has the norm {before}; {after} starts from" in line
    assert not (tmp_path / "second").exists()
