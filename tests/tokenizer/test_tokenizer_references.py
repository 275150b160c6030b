"""Ids against each reference library on the 1,000 C4 documents, and where two references differ."""

import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmstack.tokenizer.tiktoken_ranks import SPECIAL_TOKENS

# Written down again from Meta's reference, not imported: a slip in ours must not hide here.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fast_conversion(model: Path, folder: Path) -> Any:
    """transformers' fast tokenizer made from a SentencePiece model."""
    from transformers import AutoTokenizer

    shutil.copy(model, folder / "tokenizer.model")
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": False, **marks}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


def reference_encoding(paths: dict[str, Path]) -> Any:
    import tiktoken

    lines = (paths["llama-3"]).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return tiktoken.Encoding("reference", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("name", ["llama-2", "tok512", "mistral-v1", "mistral-v3"])
def test_sentencepiece_kinds_equal_the_processor(name, loaded, encoded, c4, paths):
    from sentencepiece import SentencePieceProcessor

    reference = SentencePieceProcessor(model_file=str(paths[name]))
    ids = reference.encode(c4)
    assert encoded[name] == ids
    assert [loaded[name].encode(text) for text in c4[:50]] == ids[:50]
    assert [loaded[name].decode(x) for x in ids] == reference.decode(ids)


def test_llama3_equals_tiktoken(loaded, encoded, c4, paths):
    reference = reference_encoding(paths)
    ids = [reference.encode_ordinary(text) for text in c4]
    assert encoded["llama-3"] == ids
    assert [loaded["llama-3"].encode(text) for text in c4[:50]] == ids[:50]


def test_gpt2_equals_transformers(loaded, encoded, c4, paths):
    from transformers import GPT2Tokenizer

    folder = paths["gpt2"]
    reference = GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    assert reference("Hello world").input_ids == [15496, 995]
    assert encoded["gpt2"] == reference(c4).input_ids


def test_gpt2_equals_tiktoken(encoded, c4, paths, monkeypatch):
    """OpenAI's own library: it shares no code with ``tokenizers``, on which both ours and transformers' run."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    folder = paths["gpt2"]
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "merges.txt"), str(folder / "vocab.json"))
    split = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    reference = tiktoken.Encoding("reference", pat_str=split, mergeable_ranks=ranks, special_tokens={})
    assert encoded["gpt2"] == [reference.encode_ordinary(text) for text in c4]


def test_tokenizer_json_equals_tokenizers(loaded, encoded, c4, paths):
    from tokenizers import Tokenizer as Backend

    reference = Backend.from_file(str(paths["gpt-neox"]))
    ids = [encoding.ids for encoding in reference.encode_batch(c4, add_special_tokens=False)]
    assert encoded["gpt-neox"] == ids
    assert [loaded["gpt-neox"].decode(x) for x in ids] == reference.decode_batch(ids)


@pytest.mark.parametrize(("name", "different_stories"), [("llama-2", 3), ("tok512", 5)])
def test_where_sentencepiece_and_the_fast_conversion_differ(
    name, different_stories, loaded, c4, shared, paths, tmp_path
):
    fast = fast_conversion(paths[name], tmp_path)
    with (shared / "tinystories/tinystories.jsonl").open(encoding="utf-8") as lines:
        stories = [json.loads(line)["text"] for line in itertools.islice(lines, 200)]
    for texts, count in ((c4, 2), (stories, different_stories)):
        ours = loaded[name].encode_batch(texts)
        theirs = [fast.encode(text, add_special_tokens=False) for text in texts]
        differing = [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]
        assert len(differing) == count
        assert all("  " in text for text in differing)


KNOWN_IDS = {
    "llama-2": [15043, 3186],
    "llama-3": [9906, 1917],
    "gpt2": [15496, 995],
}


@pytest.mark.parametrize("name", KNOWN_IDS)
def test_published_ids(name, loaded):
    assert loaded[name].encode("Hello world") == KNOWN_IDS[name]


SIZES_AND_MARKS = {
    "llama-2": (32000, 1, 2),
    "tok512": (512, 1, 2),
    "mistral-v1": (32000, 1, 2),
    "mistral-v3": (32768, 1, 2),
    "llama-3": (128256, 128000, 128001),
    "gpt2": (50257, None, 50256),
    "gpt-neox": (50280, None, 50279),
}


def test_published_sizes_and_marks(kind, tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == SIZES_AND_MARKS[kind]


def test_llama3_special_tokens_of_the_model_card():
    names = {128000 + i: name for i, name in enumerate(SPECIAL_TOKENS)}
    assert len(set(SPECIAL_TOKENS)) == 256
    assert names[128004] == "<|finetune_right_pad_id|>"
    assert (names[128006], names[128007]) == ("<|start_header_id|>", "<|end_header_id|>")
    assert (names[128008], names[128009]) == ("<|eom_id|>", "<|eot_id|>")
    assert (names[128010], names[128255]) == ("<|python_tag|>", "<|reserved_special_token_245|>")


def test_stories260k_text_and_ids(loaded, shared):
    folder = shared / "checkpoints/stories260K"
    ids = json.loads((folder / "greedy-256.ids.json").read_text())
    ids = ids["ids"] if isinstance(ids, dict) else ids
    text = (folder / "greedy-256.txt").read_text(encoding="utf-8")
    assert loaded["tok512"].decode(ids).strip() == text.strip()
