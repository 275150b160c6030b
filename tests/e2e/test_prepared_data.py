"""Text that is tokenised beforehand trains as the text itself does."""

import json
from pathlib import Path

from tests.e2e.conftest import SMALL, Command
from tests.e2e.job import rows_of


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
