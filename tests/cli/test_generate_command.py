"""``llmstack generate`` as a user runs it, on the real stories260K."""

import io
import json
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import load_model, write_checkpoint
from llmstack.cli.main import main
from llmstack.model import Llama, ModelConfig


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    return shared / "checkpoints/stories260K"


@pytest.fixture(scope="module")
def published_ids(stories: Path) -> list[int]:
    return json.loads((stories / "greedy-256.ids.json").read_text())


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small random model."""
    torch.manual_seed(0)
    model = Llama(ModelConfig(vocab_size=40, hidden_size=32, num_layers=1, intermediate_size=32))
    folder = tmp_path_factory.mktemp("run") / "step-00000003"
    return write_checkpoint(folder, step=3, config=model.config.to_dict(), weights=model.state_dict())


def test_greedy_text_is_the_published_one(
    stories: Path, published_ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = tmp_path / "report.json"
    assert main(["generate", str(stories / "hf"), "--max-new-tokens", "256", "--json", str(report)]) == 0
    out, err = capsys.readouterr()
    assert out == (stories / "greedy-256.txt").read_text()
    assert "tokens/s" in err
    found = json.loads(report.read_text())
    assert (found["prompt_ids"], found["ids"], found["finish"]) == ([1], published_ids, "length")
    assert found["text"] + "\n" == out
    assert found["tokens_per_second"] > 0


def test_without_the_cache_the_ids_are_the_same(
    stories: Path, published_ids: list[int], capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", str(stories / "hf"), "--max-new-tokens", "60", "--no-cache", "--ids"]) == 0
    assert capsys.readouterr().out == ",".join(map(str, published_ids[:60])) + "\n"


def test_a_text_prompt_gets_bos_and_ids_are_taken_as_they_are(
    stories: Path, published_ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time", encoding="utf-8")
    command = ["generate", str(stories / "hf"), "--max-new-tokens", "9", "--ids"]
    for option in (
        ["--prompt", "Once upon a time"],
        ["--prompt-file", str(prompt)],
        ["--prompt-ids", "1,403,407,261,378"],
    ):
        assert main([*command, *option]) == 0
        assert capsys.readouterr().out == ",".join(map(str, published_ids[4:13])) + "\n"


def test_a_shown_seed_repeats_the_text(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "report.json"
    command = ["generate", str(stories / "hf"), "--max-new-tokens", "40", "--top-p", "0.9", "--json", str(report)]
    assert main(command) == 0
    text = capsys.readouterr().out
    seed = json.loads(report.read_text())["seed"]
    assert main([*command, "--seed", str(seed), "--temperature", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == text
    assert f"temperature 1, seed {seed}" in err
    assert main([*command, "--seed", str(seed + 1)]) == 0
    assert capsys.readouterr().out != text


def test_every_form_gives_the_published_ids(
    stories: Path, published_ids: list[int], capsys: pytest.CaptureFixture[str]
):
    command = ["generate", str(stories / "hf"), "--max-new-tokens", "100", "--ids"]
    for option in (["--no-fold"], ["--draft", "lookup"], ["--draft", str(stories / "hf"), "--draft-tokens", "3"]):
        assert main([*command, *option]) == 0
        out, err = capsys.readouterr()
        assert out == ",".join(map(str, published_ids[:100])) + "\n"
        assert ("proposed tokens" in err) == ("--draft" in option)


def test_samples_are_those_of_their_seeds(stories: Path, capsys: pytest.CaptureFixture[str]):
    command = [
        "generate",
        str(stories / "hf"),
        "--max-new-tokens",
        "30",
        "--min-p",
        "0.05",
        "--repetition-penalty",
        "1.1",
    ]
    alone = []
    for seed in (7, 8, 9):
        assert main([*command, "--seed", str(seed)]) == 0
        alone.append(f"[{seed}] {capsys.readouterr().out}")
    assert main([*command, "--seed", "7", "--num-samples", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(alone)
    assert "90 new ones" in err


def test_ends_before_a_stop_text_and_with_a_stop_id(
    stories: Path, published_ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole, report = (stories / "greedy-256.txt").read_text(), tmp_path / "report.json"
    command = ["generate", str(stories / "hf"), "--max-new-tokens", "200", "--json", str(report)]
    assert main([*command, "--stop", "nowhere", "--stop", "loved to p"]) == 0
    assert capsys.readouterr().out == whole.partition("loved to p")[0] + "\n"
    assert json.loads(report.read_text())["finish"] == "stop"
    stop = published_ids[20]
    assert main([*command, "--ids", "--stop-ids", f"3,{stop}"]) == 0
    found = [int(part) for part in capsys.readouterr().out.split(",")]
    assert found == published_ids[: published_ids.index(stop) + 1]


def test_a_bias_forbids_an_id(stories: Path, published_ids: list[int], capsys: pytest.CaptureFixture[str]):
    first = published_ids[0]
    command = ["generate", str(stories / "hf"), "--max-new-tokens", "1", "--ids"]
    assert main([*command, "--logit-bias", f"{first}:-inf,5:-1.5"]) == 0
    assert capsys.readouterr().out != f"{first}\n"


@pytest.mark.parametrize("option", [["--weights", "int8"], ["--cache-dtype", "int8"], ["--dtype", "bf16"]])
def test_less_exact_forms_still_tell_a_story(stories: Path, option: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["generate", str(stories / "hf"), "--max-new-tokens", "20", *option]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time, there was a")


def test_each_line_of_input_is_continued(
    stories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["generate", str(stories / "hf"), "--max-new-tokens", "12"]
    texts = ["Once upon", "Tom had", "Once upon"]
    alone = []
    for text in texts:
        assert main([*command, "--prompt", text]) == 0
        alone.append(capsys.readouterr().out)
    too_long = "word " * 2000
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*texts[:1], too_long, *texts[1:]])))
    assert main([*command, "--interactive"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(alone)
    assert "shorten one of them" in err


def test_ends_at_eos(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # A copy of the model whose head always prefers EOS.
    model = load_model(stories / "hf")
    with torch.no_grad():
        config = ModelConfig(**{**model.config.to_dict(), "lm_head_bias": True})
        weights = model.state_dict() | {"lm_head.bias": torch.zeros(512).index_fill_(0, torch.tensor(2), 1e4)}
    ckpt = write_checkpoint(
        tmp_path / "step-00000001",
        step=1,
        config=config.to_dict(),
        weights=weights,
        tokenizer=_tokenizer(stories, tmp_path),
    )
    assert main(["generate", str(ckpt), "--prompt", "Once", "--max-new-tokens", "20", "--ids"]) == 0
    out, err = capsys.readouterr()
    assert out == "2\n"
    assert "ended by EOS" in err


def test_ids_go_in_and_out_without_a_tokenizer(without_tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", str(without_tokenizer), "--prompt-ids", "3,4", "--max-new-tokens", "5"]) == 0
    ids = [int(part) for part in capsys.readouterr().out.split(",")]
    assert len(ids) == 5
    assert all(0 <= token < 40 for token in ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x"], "no tokenizer: give the prompt as --prompt-ids"),
        ([], "no tokenizer"),
        (["--prompt-ids", "3,40"], "id 40 is outside the model's vocabulary, 0 to 39"),
        (["--prompt-ids", "3,x"], "not whole numbers"),
        (["--prompt-ids", ""], "the prompt is empty"),
        (
            ["--prompt-ids", "1", "--max-new-tokens", "4096"],
            "1 prompt tokens + 4096 new ones are 4097, but the model has",
        ),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], "at least 1 is needed"),
        (["--prompt-ids", "1", "--top-p", "2"], "top_p is 2.0"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt-ids", "1", "--no-cache", "--compile"], "needs the cache"),
        (["--prompt-ids", "1", "--prompt", "x"], "not allowed with"),
        (["--prompt-file", "missing.txt"], "no tokenizer"),
        (["--interactive"], "of a checkpoint with a tokenizer"),
        (["--prompt-ids", "1", "--stop", "x"], "stop strings need a tokenizer"),
        (["--prompt-ids", "1", "--stop-ids", "x"], "--stop-ids x: not whole numbers"),
        (["--prompt-ids", "1", "--logit-bias", "4"], "--logit-bias 4: not ID:X"),
        (["--prompt-ids", "1", "--logit-bias", "40:1"], "id 40 is outside"),
        (["--prompt-ids", "1", "--min-p", "2"], "min_p is 2.0"),
        (["--prompt-ids", "1", "--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--prompt-ids", "1", "--num-samples", "0"], "0 is no whole number of at least 1"),
        (["--prompt-ids", "1", "--weights", "int8", "--dtype", "fp32"], "must be in bf16"),
        (["--prompt-ids", "1", "--draft", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    without_tokenizer: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert main(["generate", str(without_tokenizer), *options]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_prompt_file_that_cannot_be_read_is_named(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing, latin = tmp_path / "missing.txt", tmp_path / "latin.txt"
    latin.write_bytes("né".encode("latin-1"))
    for path, message in ((missing, "cannot be read"), (latin, "not UTF-8")):
        assert main(["generate", str(stories / "hf"), "--prompt-file", str(path)]) == 2
        assert f"{path}: {message}" in capsys.readouterr().err


def _tokenizer(stories: Path, tmp_path: Path) -> Path:
    from llmstack.tokenizer import load_tokenizer

    load_tokenizer(stories / "tok512.model").save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"
