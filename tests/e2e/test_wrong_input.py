"""Wrong input: one clear line, exit status 2, nothing half-written. Run through the command's own entry point."""

from pathlib import Path

import pytest

from llmstack.cli.main import main
from tests.e2e.conftest import SMALL

STEPS = ["--trainer.max_steps", "3"]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """``refused(*arguments)`` -> the one line of a command that exits with 2 and leaves the folder as it was."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        capfd.readouterr()
        assert main(list(arguments)) == 2
        captured = capfd.readouterr()
        lines = [line for line in captured.err.splitlines() if line.strip()]
        assert len(lines) == 1, lines
        assert lines[0].startswith("llmstack: ")
        assert captured.out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "norm/nope.yaml"], ["norm/nope.yaml", "norm/bhyt.yaml"]),
        (["--model.config.norm.method", "nope"], ["unknown method 'nope'", "rmsnorm"]),
        (["--model.config.norm.kapa", "3"], ["unknown option kapa", "kappa"]),
        (["--model.config.norm.kappa", "wide"], ["kappa", "a number"]),
        (["--model.config.norm.kappa", "-1"], ["kappa", "above 0"]),
        (["--model.config.num_heads", "3"], ["num_heads 3"]),
        (["--model.config.hidden_sise", "64"], ["hidden_sise"]),
        (["--model.optimizer.lr", "-0.001"], ["lr is -0.001"]),
        (["--model.optimizer.schedule", "linear"], ["schedule"]),
        (["--model.config.vocab_size", "100"], ["vocab_size is 100", "511"]),
        (["--model.config.max_position_embeddings", "16"], ["block_size 32", "16"]),
        (["--model.init_from", "nowhere"], ["nowhere"]),
        (["--data.block_size", "100000000"], ["100,000,000"]),
        (["--data.block_size", "0"], ["block_size is 0"]),
        (["--data.micro_batch_size", "0"], ["micro_batch_size is 0"]),
        (["--data.files", "x.txt"], ["data.source is embedded"]),
        (["--data.source", "text"], ["data.files is not set"]),
        (["--data.source", "poems"], ["source"]),
        (["--trainer.max_steps", "many"], ["trainer.max_steps"]),
        (["--trainer.max_steps", "-1"], ["max_steps is -1"]),
        (["--trainer.max_epochs", "1"], ["max_epochs", "trainer.max_steps"]),
        (["--trainer.max_time", "00:00:00:01"], ["max_time"]),
        (["--trainer.fast_dev_run", "true"], ["fast_dev_run"]),
        (["--trainer.limit_val_batches", "0"], ["limit_val_batches"]),
        (["--trainer.val_check_interval", "2"], ["val_check_interval", "run.validate_every"]),
        (["--trainer.accumulate_grad_batches", "0"], ["accumulate_grad_batches is 0"]),
        (["--trainer.gradient_clip_val", "-1"], ["gradient_clip_val is -1"]),
        (["--trainer.devices", "2"], ["2 processes"]),
        (["--trainer.num_nodes", "2"], ["2 processes"]),
        (["--trainer.strategy", "ddp"], ["strategy"]),
        (["--trainer.precision", "bf16-true"], ["precision", "bf16-mixed"]),
        (["--model.optimizer.lr", "1e400"], ["lr is inf"]),
        (["--model.config.rms_norm_eps", "1e400"], ["rms_norm_eps"]),
        (["--run.checkpoint_every", "often"], ["run.checkpoint_every is often"]),
        (["--trainer.accelerator", "abacus"], ["abacus"]),
        (["--trainer.precision", "3-bit"], ["precision"]),
        (["--run.keep_checkpoints", "1"], ["keep_checkpoints"]),
        (["--run.checkpoint_every", "0"], ["checkpoint_every"]),
        (["stray"], ["stray"]),
    ],
    ids=lambda value: "".join(value[:2])[:40],
)
def test_fit_names_what_is_wrong(refused, arguments: list[str], words: list[str]) -> None:
    line = refused("fit", *SMALL, *STEPS, "--run.dir", "run", *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["corpus.jsonl"]),
        (b'{"text": "one"}\n{"text": ', ["corpus.jsonl:2"]),
        (b'{"body": "x"}\n', ["corpus.jsonl:1"]),
    ],
    ids=["empty", "cut", "no-text"],
)
def test_bad_text_is_named_with_its_line(refused, tmp_path: Path, content: bytes, words: list[str]) -> None:
    from llmstack.data.embedded import embedded_tokenizer

    embedded_tokenizer(512).save(tmp_path / "tokenizer")
    (tmp_path / "corpus.jsonl").write_bytes(content)
    text = ["-c", "data/text.yaml", "--data.files", "corpus.jsonl", "--data.tokenizer", "tokenizer"]
    line = refused("fit", *SMALL, *STEPS, *text, "--run.dir", "run")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "content",
    ["", "data:\n", "model: [config]\n", "model: {config: {norm: *nothing}}\n", "a: &a [*a]\n", "\ttab: 1\n", "- 1\n"],
)
def test_a_broken_configuration_is_named(refused, tmp_path: Path, content: str) -> None:
    """A null section would otherwise silently drop what earlier files said."""
    (tmp_path / "mine.yaml").write_text(content)
    assert "mine.yaml" in refused("fit", *SMALL, *STEPS, "--run.dir", "run", "-c", "mine.yaml")


@pytest.mark.parametrize("name", ["folder", "/nowhere/at/all.yaml"])
def test_what_is_no_configuration_file_is_named(refused, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert name in refused("fit", "-c", name)


def test_an_impossible_run_folder_is_one_line(refused) -> None:
    refused("fit", *SMALL, *STEPS, "--run.dir", "long" * 100)


def test_a_cache_that_cannot_be_written_is_one_line(refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMSTACK_CACHE", str(tmp_path / "file" / "cache"))
    assert "cache" in refused("fit", *SMALL, *STEPS, "--run.dir", "run")


def test_a_missing_tokenizer_is_named(refused, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("words " * 50_000)
    text = ["-c", "data/text.yaml", "--data.files", "corpus.txt", "--data.tokenizer", "tok.model"]
    assert "tok.model" in refused("fit", *SMALL, *STEPS, *text, "--run.dir", "run")


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        [],
        ["generate", "nowhere", "--prompt", "x"],
        ["inspect", "nowhere"],
        ["perplexity", "nowhere", "--dataset", "x.txt"],
        ["perplexity"],
        ["validate", "-c", "quickstart.yaml"],
        ["validate", "-c", "quickstart.yaml", "--ckpt_path", "nowhere"],
        ["tokenizer", "train", "--files", "nowhere.txt", "--vocab-size", "300", "--out", "tok"],
    ],
    ids=lambda value: "-".join(value[:2]) or "nothing",
)
def test_the_other_commands_too(refused, arguments: list[str]) -> None:
    refused(*arguments)


def test_a_foreign_folder_is_not_taken_for_a_run(tmp_path: Path, refused) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    assert "thesis" in refused("fit", *SMALL, *STEPS, "--run.dir", "thesis")
