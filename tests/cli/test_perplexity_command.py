"""``llmstack perplexity`` as a user runs it, on the real stories260K and TinyStories."""

import gzip
import json
import math
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llmstack.checkpoint import load_model
from llmstack.cli.main import main
from llmstack.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSTACK_DATA", str(tmp_path / "hub"))


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
    model = load_model(ckpt)
    tokenizer = load_tokenizer(Path(ckpt))
    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text.read_text())]])
    for result in (plain, overlapping):
        assert result["nats_per_token"] == pytest.approx(mean_loss(model, ids, 256, result["stride"]), rel=1e-5)


@torch.no_grad()
def mean_loss(model: torch.nn.Module, ids: torch.Tensor, window: int, stride: int) -> float:
    """By one forward pass per window, on ids [1, seq]."""
    tokens = ids.shape[1] - 1
    nats = 0.0
    for scored, end in pairwise([0, *range(window, tokens, stride), tokens]):
        start = max(end - window, 0)
        losses = F.cross_entropy(model(ids[:, start:end])[0], ids[0, start + 1 : end + 1], reduction="none")
        nats += losses[scored - start :].double().sum().item()
    return nats / tokens


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


def test_wikitext2_is_scored_as_one_text_with_its_lines_as_they_are(
    ckpt: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The same numbers as of a file with the text, and the perplexity of a word beside that of a token."""
    parquet = pytest.importorskip("pyarrow.parquet")
    hub = shared / "eval"
    if not hub.is_dir():
        pytest.skip(f"no {hub}")
    (table,) = (hub / "Salesforce/wikitext/wikitext-2-raw-v1").glob("test-*.parquet")
    rows = parquet.read_table(table).column("text").to_pylist()[:30]
    text = tmp_path / "text.txt"
    text.write_text("".join(row or " \n" for row in rows), encoding="utf-8", newline="")
    output = tmp_path / "result.json"
    named = ["wikitext2", "--data-root", str(hub), "--max-documents", "30"]
    results = []
    for options in ([*named], [*named, "--batch-tokens", "512"], [str(text)]):
        assert main(["perplexity", ckpt, "--dataset", *options, "--output", str(output)]) == 0
        results.append(json.loads(output.read_text()))
    out = capsys.readouterr().out
    found, _, expected = results
    for result in results:
        assert result["nats_per_token"] == pytest.approx(expected["nats_per_token"], rel=1e-5)
    nats = found["nats_per_token"] * found["tokens"]
    words = len(text.read_text().split())
    assert (found["bytes"], found["words"], found["documents"]) == (text.stat().st_size, words, 1)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / words))
    assert (found["dataset"], found["per_document"]) == ("wikitext2:test", False)
    assert "wikitext2:test: the raw file after BOS, window 512" in out
    assert f"token level: {found['nats_per_token']:.4f} nats per token, perplexity {found['perplexity']:.4f}" in out
    assert f"word level: perplexity {found['word_perplexity']:.4f} of {words} words" in out
    assert f"byte level: {found['bits_per_byte']:.4f} bits per byte" in out


def test_c4_is_its_validation_split_by_document_unless_a_path_has_that_name(
    ckpt: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with open(shared / "c4/c4_en_valid_1k.jsonl", encoding="utf-8") as lines:
        rows = list(islice(lines, 4))
    folder = tmp_path / "hub/allenai/c4/en"
    folder.mkdir(parents=True)
    for number in (0, 1):
        name = f"c4-validation.{number:05}-of-00008.json.gz"
        (folder / name).write_bytes(gzip.compress("".join(rows[number * 2 : number * 2 + 2]).encode()))
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4/one.jsonl").write_text(rows[0], encoding="utf-8")
    (tmp_path / "all.jsonl").write_text("".join(rows), encoding="utf-8")
    output = tmp_path / "result.json"

    def measured(*options: str) -> dict[str, object]:
        assert main(["perplexity", ckpt, "--output", str(output), "--dataset", *options]) == 0
        result = json.loads(output.read_text())
        return {key: result[key] for key in result if key != "dataset"}

    by_document = measured(str(tmp_path / "all.jsonl"), "--per-document")
    assert measured("c4") == measured("c4:validation") == by_document
    assert measured("c4", "--no-per-document") == measured(str(tmp_path / "all.jsonl"))
    monkeypatch.chdir(tmp_path)
    assert measured("c4") == measured("c4/one.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "c4"], "c4: no en/c4-validation.*.json.gz in"),
        (["--dataset", "wikitext2"], "on a node with internet, run llmstack fetch --what wikitext2"),
        (["--dataset", "wikitext2", "--data-root", "/no/such/hub"], "in /no/such/hub/Salesforce/wikitext;"),
        (["--dataset", "c4:test"], "c4 has no split 'test'; it has train, validation"),
        (["--dataset", "wikitext2", "--per-document"], "leave out --per-document"),
        (["--dataset", "STORIES", "--batch-tokens", "0"], "is no whole number of at least 1"),
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
