"""``llmstack tokenizer train``."""

import argparse
import gzip
import json

import pytest

from llmstack.cli.tokenizer import add_parser
from llmstack.errors import UserError
from llmstack.tokenizer import BosEosPolicy, load_policy, load_tokenizer


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["tokenizer", "train", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": f"the cat number {i} sat on the mat — é"}) + "\n" for i in range(50)]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(lines)
    (tmp_path / "a.txt").write_text("one long text about a cat and a mat\n" * 20, encoding="utf-8")
    return [tmp_path / "a.txt", tmp_path / "b.jsonl.gz"]


def test_train(corpus, tmp_path, capsys):
    out = tmp_path / "deep/tokenizer"
    assert run("--files", *corpus, "--vocab-size", 300, "--out", out) == 0
    tokenizer = load_tokenizer(out)
    assert tokenizer.vocab_size == 300
    assert load_policy(out) == BosEosPolicy(bos=True, eos=True)

    texts = [f"the cat number {i} sat on the mat — é" for i in range(50)]
    texts.append(corpus[0].read_text(encoding="utf-8"))
    report = json.loads((out / "training.json").read_text())
    assert report["vocab_size"] == 300
    assert report["documents"] == 51
    assert report["bytes"] == sum(len(text.encode()) for text in texts)
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert report["bytes_per_token"] == pytest.approx(report["bytes"] / tokens)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert [path.name for path in out.parent.iterdir()] == ["tokenizer"]


def test_same_files_same_tokenizer_into_an_empty_folder(corpus, tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        run("--files", *corpus, "--vocab-size", 280, "--out", tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("x", "y"))
    assert first == second


def test_fewer_ids_than_asked_are_said(corpus, tmp_path, capsys):
    run("--files", *corpus, "--vocab-size", 5000, "--out", tmp_path / "out")
    assert "of 5000 asked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "size", "match"),
    [
        (b"text enough", 257, "too small"),
        (b"", 300, "empty|no character"),
        (None, 300, "no file|no such"),
        (b'{"txt": "wrong field"}\n', 300, r"in\.jsonl:1"),
    ],
)
def test_faults_leave_nothing(content, size, match, tmp_path):
    files = tmp_path / "in"
    files.mkdir()
    file = files / ("in.jsonl" if content and content.startswith(b"{") else "in.txt")
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=match):
        run("--files", file, "--vocab-size", size, "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_output_that_exists(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        run("--files", *corpus, "--vocab-size", 300, "--out", out)
    with pytest.raises(UserError, match="is a file"):
        run("--files", *corpus, "--vocab-size", 300, "--out", out / "kept")
    assert (out / "kept").read_text() == "mine"
