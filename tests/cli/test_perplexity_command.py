"""``llmstack perplexity`` as a user runs it, on the real stories260K and TinyStories."""

import gzip
import json
from pathlib import Path

import pytest

from llmstack.cli.main import main


@pytest.fixture(scope="module")
def ckpt(shared: Path) -> str:
    return str(shared / "checkpoints/stories260K/hf")


@pytest.fixture(scope="module")
def tinystories(shared: Path) -> str:
    return str(shared / "tinystories/tinystories.jsonl")


def test_stories260k_on_200_tinystories_has_the_known_loss(
    ckpt: str, tinystories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "result.json"
    options = ["--per-document", "--max-tokens", "512", "--max-documents", "200", "--output", str(output)]
    assert main(["perplexity", ckpt, "--dataset", tinystories, *options]) == 0
    result = json.loads(output.read_text())
    assert result["nats_per_token"] == pytest.approx(1.4772, abs=5e-5)
    assert (result["tokens"], result["documents"], result["bits_per_byte"]) == (79_248, 200, None)
    assert "1.4772 nats per token" in capsys.readouterr().out


def test_int8_costs_less_than_half_a_percent(ckpt: str, shared: Path, tmp_path: Path):
    pytest.importorskip("torchao")
    found = {}
    for weights in ("fp32", "bf16", "int8"):
        output = tmp_path / f"{weights}.json"
        c4 = str(shared / "c4/c4_en_valid_1k.jsonl")
        options = ["--per-document", "--max-tokens", "512", "--max-documents", "30", "--output", str(output)]
        assert main(["perplexity", ckpt, "--dataset", c4, "--weights", weights, *options]) == 0
        found[weights] = json.loads(output.read_text())
    assert found["int8"]["tokens"] == found["fp32"]["tokens"]
    assert found["int8"]["perplexity"] != found["bf16"]["perplexity"]
    for weights in ("bf16", "int8"):
        assert found[weights]["perplexity"] == pytest.approx(found["fp32"]["perplexity"], rel=0.01)
    assert found["int8"]["perplexity"] == pytest.approx(found["bf16"]["perplexity"], rel=0.005)


def test_int4_of_a_width_that_has_no_groups_is_refused(ckpt: str, tinystories: str, capsys: pytest.CaptureFixture[str]):
    assert main(["perplexity", ckpt, "--dataset", tinystories, "--weights", "int4"]) == 2
    assert "not a multiple of 64; use int8" in capsys.readouterr().err


def test_one_text_is_scored_whole_and_a_stride_gives_it_more_context(
    ckpt: str, tinystories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with open(tinystories, encoding="utf-8") as lines:
        stories = [json.loads(next(lines))["text"] for _ in range(6)]
    text, packed, rows = tmp_path / "a.txt", tmp_path / "a.txt.gz", tmp_path / "a.jsonl"
    text.write_text("\n\n".join(stories), encoding="utf-8")
    packed.write_bytes(gzip.compress(text.read_bytes()))
    rows.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories), encoding="utf-8")
    results = []
    for file, stride in ((text, 256), (packed, 256), (rows, 256), (text, 64)):
        output = tmp_path / "result.json"
        options = ["--window", "256", "--stride", str(stride), "--output", str(output)]
        assert main(["perplexity", ckpt, "--dataset", str(file), *options]) == 0
        results.append(json.loads(output.read_text()))
    plain, compressed, joined, overlapping = results
    assert plain["bytes"] == text.stat().st_size
    assert plain["bits_per_byte"] == pytest.approx(
        plain["nats_per_token"] * plain["tokens"] / 0.6931471805599453 / plain["bytes"]
    )
    for key in ("nats_per_token", "tokens", "bytes"):
        assert plain[key] == compressed[key] == joined[key]
    assert overlapping["tokens"] == plain["tokens"]
    assert overlapping["nats_per_token"] < plain["nats_per_token"]
    assert (plain["stride"], overlapping["stride"]) == (256, 64)


def test_long_documents_are_windowed_not_dropped(ckpt: str, tinystories: str, tmp_path: Path):
    output = tmp_path / "result.json"
    with open(tinystories, encoding="utf-8") as lines:
        long = "\n".join(json.loads(next(lines))["text"] for _ in range(4))
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in (long, "One day.")), encoding="utf-8")
    assert main(["perplexity", ckpt, "--dataset", str(file), "--per-document", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["tokens"] > result["window"] == 512
    assert result["bytes"] == len(long.encode()) + len("One day.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "c4"], "give the path of a local file"),
        (["--dataset", "wikitext2"], "give the path of a local file"),
        (["--dataset", "nowhere.txt"], "nowhere.txt"),
        (["--dataset", "STORIES", "--max-tokens", "10"], "needs --per-document"),
        (["--dataset", "STORIES", "--per-document", "--max-tokens", "1"], "at least 2"),
        (["--dataset", "STORIES", "--max-documents", "0"], "--max-documents is 0"),
        (["--dataset", "STORIES", "--max-documents", "1", "--window", "513"], "allows 1 to 512"),
        (["--dataset", "STORIES", "--max-documents", "1", "--stride", "0"], "stride is 0"),
        (["--dataset", "STORIES", "--output", "/no/such/folder/x.json"], "no such folder"),
        (["--dataset", "STORIES", "--max-documents", "1", "--tokenizer", "GPT2"], "is outside the model's vocabulary"),
        (["--dataset", "STORIES", "--tokenizer", "nowhere"], "nowhere: no such tokenizer"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    ckpt: str, tinystories: str, shared: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    places = {"STORIES": tinystories, "GPT2": str(shared / "tokenizers/gpt2")}
    assert main(["perplexity", ckpt, *(places.get(option, option) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
