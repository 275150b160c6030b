"""Text that is tokenised beforehand, mixed, or streamed, as a user trains on it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, Command
from tests.e2e.job import TINY, finished, rows_of


def test_prepared_text_trains_as_the_text_does(llmstack: Command, tmp_path: Path) -> None:
    """The same losses; the folder says what it holds, is not made twice, and not overwritten by other data."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"Story {i}: " + "the quick brown fox " * (i % 13 + 1) for i in range(400)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{}\n")
    trained = llmstack("tokenizer", "train", "--files", str(corpus), "--vocab-size", "300", "--out", "tokenizer")
    assert trained.returncode == 2, "the bad row is an error there"
    corpus.write_text(corpus.read_text().removesuffix("{}\n"))
    assert llmstack("tokenizer", "train", "--files", str(corpus), "--vocab-size", "300", "--out", "T").returncode == 0
    corpus.write_text(corpus.read_text() + "{}\n")
    prepare = ["prepare", "--source", str(corpus), "--tokenizer", "T", "--out", "prepared"]
    prepared = llmstack(*prepare)
    assert prepared.returncode == 0, prepared.stderr
    found = json.loads(prepared.stdout)
    assert found["skipped_rows"] == 1
    assert (found["train"]["documents"], found["heldout"]["documents"]) == (350, 50)
    assert "1 bad rows were skipped" in prepared.stderr
    assert llmstack(*prepare).stdout == prepared.stdout
    other = llmstack(*prepare, "--text-field", "body", "--max-bad-share", "1")
    assert other.returncode == 2
    assert "holds other prepared data" in other.stderr

    model = [*SMALL[:4], "-c", "trainer/cpu.yaml", *SMALL[8:14], "--model.compile", "false"]
    sources = {
        "text": ["-c", "data/text.yaml", "--data.files", str(corpus), "--data.tokenizer", "T"],
        "prepared": ["-c", "data/prepared.yaml", "--data.folder", "prepared"],
    }
    short = ["--data.block_size", "32", "--trainer.max_steps", "12"]
    losses = {}
    for name, source in sources.items():
        run = tmp_path / f"run-{name}"
        fitted = llmstack("fit", *model, *source, *short, "--run.dir", str(run))
        assert fitted.returncode == 0, fitted.stderr
        losses[name] = [row["loss"] for row in rows_of(run)]
    assert losses["text"] == losses["prepared"]
    generated = llmstack("generate", "prepared", "--prompt", "Story")
    assert generated.returncode == 2


def test_a_mixture_says_what_it_gives_and_gave(llmstack: Command, tmp_path: Path) -> None:
    """Two sets, three to one; interrupted, the run goes on in the same order; another mixture is refused."""
    for name in ("a", "b"):
        lines = (json.dumps({"text": f"{name} says {i} " * (i % 9 + 1)}) + "\n" for i in range(400))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    assert llmstack("tokenizer", "train", "--files", "a.jsonl", "--vocab-size", "280", "--out", "T").returncode == 0
    for name in ("a", "b"):
        prepared = llmstack("prepare", "--source", f"{name}.jsonl", "--tokenizer", "T", "--out", f"set-{name}")
        assert prepared.returncode == 0, prepared.stderr

    def fit(run: str, steps: int, mixture: str = "{set-a: 3, set-b: 1}") -> "subprocess.CompletedProcess[str]":
        model = [*SMALL[:4], "-c", "trainer/cpu.yaml", *SMALL[8:14], "--model.compile", "false"]
        data = ["-c", "data/prepared.yaml", "--data.mixture", mixture, "--data.block_size", "16"]
        rhythm = ["--run.checkpoint_every", "10", "--trainer.max_steps", str(steps), "--run.dir", str(tmp_path / run)]
        return llmstack("fit", *model, *data, *rhythm)

    whole = fit("whole", 20)
    assert whole.returncode == 0, whole.stderr
    assert "mixture, shares of the tokens: set-a 75.00 %, set-b 25.00 %" in whole.stderr
    assert "mixture, shares of the 1,280 tokens so far: set-a " in whole.stderr
    checkpoint = tmp_path / "parted" / "checkpoints" / "step-00000020"
    assert fit("parted", 20).returncode == 0
    shutil.rmtree(checkpoint)
    assert fit("parted", 20).returncode == 0
    losses = [[(row["step"], row["loss"]) for row in rows_of(tmp_path / run)] for run in ("whole", "parted")]
    assert losses[0] == losses[1]
    other = fit("parted", 20, "{set-a: 1, set-b: 1}")
    assert other.returncode == 2


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.full)])
def test_a_stream_goes_on_to_the_token(llmstack: Command, tmp_path: Path, workers: int) -> None:
    """Cut back to a checkpoint and started again: the same losses. Other counts of workers are refused."""
    for number in range(3):
        lines = (json.dumps({"text": f"{number} says {i} " * (i % 9 + 1)}) + "\n" for i in range(300))
        (tmp_path / f"{number}.jsonl").write_text("".join(lines) + ("broken\n" if number == 0 else ""))
    assert llmstack("tokenizer", "train", "--files", "2.jsonl", "--vocab-size", "280", "--out", "T").returncode == 0

    def fit(run: str, *more: str) -> "subprocess.CompletedProcess[str]":
        model = [*SMALL[:4], "-c", "trainer/cpu.yaml", *SMALL[8:14], "--model.compile", "false"]
        data = ["-c", "data/c4_stream.yaml", "--data.files", "[0.jsonl, 1.jsonl]", "--data.heldout_files", "2.jsonl"]
        data += ["--data.tokenizer", "T", "--data.block_size", "16", "--data.micro_batch_size", "2"]
        data += ["--data.num_workers", str(workers), "--trainer.accumulate_grad_batches", "3"]
        rhythm = ["--run.checkpoint_every", "7", "--trainer.max_steps", "20", "--run.dir", str(tmp_path / run)]
        return llmstack("fit", *model, *data, *rhythm, *more)

    whole = fit("whole")
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr.count(f"skipped {tmp_path / '0.jsonl'}:301: bad JSON") == 1
    assert fit("parted").returncode == 0
    for step in (14, 20):
        shutil.rmtree(tmp_path / "parted" / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "parted" / "run.json").unlink(missing_ok=True)
    refused = fit("parted", "--data.num_workers", "1" if workers else "2")
    assert refused.returncode == 2
    again = fit("parted")
    assert again.returncode == 0, again.stderr
    assert "from step 7" in again.stderr
    losses = [[(row["step"], row["loss"]) for row in rows_of(tmp_path / run)] for run in ("whole", "parted")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20


@pytest.mark.parametrize("source", ["stream", pytest.param("prepared", marks=pytest.mark.full)])
def test_two_ranks_over_uneven_files_end_together(llmstack: Command, tmp_path: Path, source: str) -> None:
    """One file of a few rows for one rank, two of many for the other; several epochs of the short one."""
    for name, rows in (("a", 3), ("b", 300), ("c", 7), ("heldout", 60)):
        lines = (json.dumps({"text": f"{name} says {i} " * (i % 9 + 1)}) + "\n" for i in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    assert llmstack("tokenizer", "train", "--files", "b.jsonl", "--vocab-size", "280", "--out", "T").returncode == 0
    files = ["a.jsonl", "b.jsonl", "c.jsonl"]
    if source == "stream":
        data = ["-c", "data/c4_stream.yaml", "--data.num_workers", "0", "--data.tokenizer", "T"]
        data += ["--data.files", f"[{', '.join(files)}]", "--data.heldout_files", "heldout.jsonl"]
    else:
        prepare = ["prepare", "--source", *files, "--heldout", "heldout.jsonl", "--tokenizer", "T", "--out", "set"]
        assert llmstack(*prepare).returncode == 0
        data = ["-c", "data/prepared.yaml", "--data.folder", "set"]
    base = [*TINY[:4], *TINY[6:], *data, "--data.block_size", "16", "--data.micro_batch_size", "3"]
    ranks = ["-c", "trainer/ddp.yaml", "--trainer.devices", "2", "--trainer.precision", "32-true"]
    job = finished(tmp_path / "run", *ranks, "--trainer.max_steps", "25", base=base, timeout=200)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 26))
    assert rows[-1]["tokens_seen"] == 25 * 2 * 3 * 16
    assert not job.said("Traceback")
