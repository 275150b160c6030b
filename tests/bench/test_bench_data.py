"""Reading prepared data costs next to nothing whatever their size, and the bench says so."""

import json
from pathlib import Path

import numpy as np
import pytest

from llmstack.bench.data import measure_reading
from llmstack.cli.main import main
from llmstack.data.holdout import Holdout
from llmstack.data.prepared import ShardWriter, write_index
from llmstack.tokenizer import BosEosPolicy
from tests.data.test_prepared import Vocabulary

BLOCKS, BLOCK = 1_000_000, 64


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A million blocks in documents of 100,000 tokens, in many shards."""
    folder = tmp_path_factory.mktemp("million")
    writers = {split: ShardWriter(folder, split, 50_000, tokens_per_shard=1 << 22) for split in ("train", "heldout")}
    document = (np.arange(100_000) % 50_000).tolist()
    for _ in range(BLOCKS * BLOCK // 100_000 + 1):
        writers["train"].add(document, 1)
    writers["heldout"].add(document, 1)
    for writer in writers.values():
        writer.close()
    shards = {split: writer.shards for split, writer in writers.items()}
    vocabulary = Vocabulary(50_000)
    write_index(folder, "i", shards, vocabulary, BosEosPolicy(False, False), [], Holdout("document", frozenset(), 2, 1))  # type: ignore[arg-type]
    return folder


def test_a_million_blocks_open_and_are_found_at_once(million: Path) -> None:
    measured = measure_reading(million, BLOCK, 8, workers=[0], seconds=0.5)
    assert measured["tokens"] >= BLOCKS * BLOCK + 1
    assert measured["open_seconds"] < 0.05
    assert max(measured["seek_seconds"].values()) < 0.001
    assert measured["loader"][0]["tokens_per_second"] > 0


def test_the_command_prints_figures_and_json(
    million: Path, tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "a.txt"
    corpus.write_text("Some words to be tokenised, again and again.\n" * 5000)
    text = ["--files", str(corpus), "--tokenizer", str(shared / "tokenizers" / "gpt2"), "--repeats", "1"]
    read = ["--folder", str(million), "--block-size", "64", "--seconds", "0.2", "--workers", "0,1"]
    assert main(["bench", "data", *read, *text, "--output", str(tmp_path / "F.json")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    measured = json.loads(last)
    assert json.loads((tmp_path / "F.json").read_text()) == measured
    assert [one["workers"] for one in measured["loader"]] == [0, 1]
    assert measured["tokenising"]["text_bytes"] == corpus.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --folder"),
        (["--files", "a.txt"], "go together"),
        (["--folder", "nowhere"], "no prepared data here"),
        (["--folder", ".", "--workers", "x"], "--workers is x"),
        (["--folder", ".", "--seconds", "0"], "--seconds is 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "data", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
