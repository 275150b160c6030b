"""Loading by file name and content, faults, saving, fingerprints, the policy."""

import json
import shutil
import subprocess
import sys

import pytest

from llmstack.errors import UserError
from llmstack.tokenizer import BosEosPolicy, load_policy, load_tokenizer, train_tokenizer

SAMPLE = "Hello  world, 12345 <s> 日本\n"


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(["the cat sat on the mat. " * 50, "a dog ate the hat " * 50], 300)


def test_saved_copy_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer)
    assert again.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.bos_id, again.eos_id) == (
        tokenizer.vocab_size,
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    assert load_policy(tmp_path) is None


def test_fingerprints_differ_and_do_not_depend_on_the_process(loaded, paths):
    ours = {name: tokenizer.fingerprint for name, tokenizer in loaded.items()}
    assert len(set(ours.values())) == len(ours)
    code = (
        "import sys; from llmstack.tokenizer import load_tokenizer; "
        "print(*[load_tokenizer(p).fingerprint for p in sys.argv[1:]])"
    )
    names = ["tok512", "gpt2", "gpt-neox"]
    command = [sys.executable, "-c", code, *(str(paths[name]) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [ours[name] for name in names]


def test_fingerprint_ignores_the_layout_of_the_file_and_not_its_meaning(trained, tmp_path):
    trained.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(spec, indent=7))
    assert load_tokenizer(path).fingerprint == trained.fingerprint
    spec["model"]["merges"].pop()
    path.write_text(json.dumps(spec))
    assert load_tokenizer(path).fingerprint != trained.fingerprint


def test_training_is_deterministic_and_lossless(c4):
    texts = c4[:200]
    first, second = train_tokenizer(texts, 600), train_tokenizer(iter(texts), 600)
    assert first.fingerprint == second.fingerprint
    assert (first.vocab_size, first.bos_id, first.eos_id) == (600, 0, 1)
    assert [first.decode(ids) for ids in first.encode_batch(c4[200:300])] == c4[200:300]
    text = "<|bos|> a <|eos|>"
    assert first.decode(first.encode(text)) == text
    assert not first.special_ids & set(first.encode(text))


def test_training_learns_the_most_frequent_pair_first():
    tokenizer = train_tokenizer(["zqzqzqzq zq"], 259)
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([258]) == "zq"
    assert tokenizer.encode("zqzq") == [258, 258]


@pytest.mark.parametrize(
    ("texts", "size", "match"), [(["text"], 257, "257 is too small"), (["", ""], 300, "no character")]
)
def test_training_refuses(texts, size, match):
    with pytest.raises(UserError, match=match):
        train_tokenizer(texts, size)


def test_training_passes_on_what_the_texts_raise():
    def texts():
        yield "a b c"
        raise UserError("f.jsonl:2: broken")

    with pytest.raises(UserError, match=r"f.jsonl:2: broken"):
        train_tokenizer(texts(), 300)


FAULTS = {
    "tokenizer.json": [b"{", b'{"model": 1}', b'{"model": {"type": "BPE", "vocab": {}}}', b'{"a": 1}'],
    "tokenizer.model": [b"\n\x0e\n\x05<unk>", b"not a model", b"IQ== 0\nIg== 7\n", b"IQ== 0\nIg== 1\n", b"\x80\x81"],
    "merges.txt": [b"#version: 0.2\na b\n"],
    "vocab.json": [b'{"a": 0}'],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, contents in FAULTS.items() for c in contents])
def test_broken_file_is_one_line_with_the_path(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError) as caught:
            load_tokenizer(path)
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_empty_file(name, tmp_path):
    (tmp_path / name).touch()
    (tmp_path / "merges.txt").touch()
    with pytest.raises(UserError, match=f"{name}: is empty"):
        load_tokenizer(tmp_path / name)


def test_missing_path_and_folder_without_tokenizer(tmp_path):
    with pytest.raises(UserError, match="absent: no such"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="no tokenizer in this folder"):
        load_tokenizer(tmp_path)


def test_truncated_files(paths, tmp_path):
    for name, file in (("llama-2", "tokenizer.model"), ("llama-3", "tokenizer.model"), ("gpt-neox", "tokenizer.json")):
        path = tmp_path / name / file
        path.parent.mkdir()
        content = paths[name].read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=str(path)):
            load_tokenizer(path)


def test_kind_is_told_by_content(paths, loaded, tmp_path):
    shutil.copy(paths["llama-3"], tmp_path / "ranks.bin")
    shutil.copy(paths["tok512"], tmp_path / "spiece")
    shutil.copy(paths["gpt-neox"], tmp_path / "olmo.json")
    for file, name in (("ranks.bin", "llama-3"), ("spiece", "tok512"), ("olmo.json", "gpt-neox")):
        assert load_tokenizer(tmp_path / file).fingerprint == loaded[name].fingerprint


def test_folder_with_two_models_is_refused(paths, tmp_path):
    shutil.copy(paths["llama-2"], tmp_path / "a.model")
    shutil.copy(paths["mistral-v3"], tmp_path / "b.model.v3")
    with pytest.raises(UserError, match=r"a\.model, b\.model\.v3"):
        load_tokenizer(tmp_path)


def converted(model, folder):
    from transformers import AutoTokenizer

    shutil.copy(model, folder / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def test_folder_with_sentencepiece_and_its_conversion(paths, loaded, tmp_path):
    converted(paths["tok512"], tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == loaded["tok512"].fingerprint

    fast = load_tokenizer(tmp_path / "tokenizer.json")
    assert (fast.name, fast.vocab_size, fast.bos_id, fast.eos_id) == ("hf-json", 512, 1, 2)
    for text in ("Once upon a time", "two  spaces ", "🤯 é\n", "<s>"):
        assert fast.decode(fast.encode(text)) == text

    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 512, "content": "<|user|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path).vocab_size == 513


@pytest.mark.parametrize(
    ("config", "model_config", "expected"),
    [
        (None, None, (0, 1)),
        ({"bos_token": "a", "eos_token": {"content": "b"}}, {"bos_token_id": 5}, ("a", "b")),
        ({"bos_token": None, "eos_token": "b"}, {"bos_token_id": 5}, (None, "b")),
        ({"bos_token": "b", "eos_token": "b"}, None, (None, "b")),
        (None, {"bos_token_id": 5, "eos_token_id": [7, 8]}, (5, 7)),
        ({"eos_token": "b"}, {"bos_token_id": 5, "eos_token_id": 7}, (5, "b")),
    ],
)
def test_marks_of_a_stock_folder(config, model_config, expected, trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in (("tokenizer_config.json", config), ("config.json", model_config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    expected = tuple(trained.encode(mark)[0] if isinstance(mark, str) else mark for mark in expected)
    assert (loaded.bos_id, loaded.eos_id) == expected
    loaded.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").fingerprint == loaded.fingerprint


def test_mark_outside_the_vocabulary(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<missing>"}')
    with pytest.raises(UserError, match="EOS token '<missing>'"):
        load_tokenizer(tmp_path)


def test_truncation_padding_and_dropout_of_a_file_are_off(trained, tmp_path):
    trained.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = None
    spec["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = "the cat sat on the mat"
    assert load_tokenizer(tmp_path).encode(text) == trained.encode(text)


def test_unknown_decoder_is_refused(trained, tmp_path):
    trained.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_save_refuses_a_folder_of_another_kind(trained, loaded, tmp_path):
    trained.save(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json: belongs to another"):
        loaded["gpt2"].save(tmp_path)


def test_policy_wraps_exactly_once(tokenizer):
    ids = tokenizer.encode("Hello world")
    policy = BosEosPolicy.default(tokenizer)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    wrapped = policy.wrap(ids, tokenizer)
    assert wrapped == [*start, *ids, tokenizer.eos_id]
    assert policy.wrap(wrapped, tokenizer) == wrapped
    assert ids == tokenizer.encode("Hello world")
    assert BosEosPolicy(bos=False, eos=False).wrap(ids, tokenizer) == ids


def test_policy_wants_a_mark_that_is_not_there(loaded):
    with pytest.raises(UserError, match="wants BOS"):
        BosEosPolicy(bos=True, eos=True).wrap([1], loaded["gpt2"])


def test_policy_is_stored(trained, tmp_path):
    for policy in (BosEosPolicy(bos=True, eos=False), BosEosPolicy(bos=False, eos=True)):
        trained.save(tmp_path, policy)
        assert load_policy(tmp_path) == policy
        assert BosEosPolicy.from_dict(policy.to_dict()) == policy
    trained.save(tmp_path)
    assert load_policy(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"bos": 1, "eos": true}', '{"bos": true}'])
def test_broken_policy(content, tmp_path):
    (tmp_path / "tokenizer_policy.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_policy\.json"):
        load_policy(tmp_path)
