"""Round trips, special strings, streaming, odd and huge texts."""

import pickle
import random
import re
import subprocess
import sys
import time

import pytest

from llmstack.errors import UserError
from llmstack.tokenizer import StreamDecoder, load_tokenizer
from llmstack.tokenizer.rust_backend import cut_exactly
from llmstack.tokenizer.tiktoken_ranks import reference_parts

ODD_TEXTS = [
    "",
    "a",
    "the\n\n\tend",
    "naïve café – “quoted” … €5",
    "日本語のテキスト。한국어, русский, عربى",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤯🤯",
    "x\0y\x7f\r\n",
    "1234567890 3.14159",
    "def f(x):\n\treturn x",
]
SPECIAL_STRINGS = "<s></s><unk>[INST] <|endoftext|><|begin_of_text|><|end_of_text|><|eot_id|><|bos|><|eos|><|padding|>"


def streamed(tokenizer, ids):
    stream = StreamDecoder(tokenizer)
    return [stream.push(token_id) for token_id in ids] + [stream.flush()]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "b", text]) == [ids, tokenizer.encode("b"), ids]
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


@pytest.mark.parametrize("text", [" a", "a ", "  a  b", "\n a", "   "])
def test_round_trip_of_spaces(kind, tokenizer, text):
    # tok512 is a model that removes extra white space; the others keep it.
    expected = re.sub(" +", " ", text).strip(" ") if kind == "tok512" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_c4_round_trips(kind, tokenizer, encoded, c4):
    decoded = [tokenizer.decode(ids) for ids in encoded[kind]]
    changed = [text for text, again in zip(c4, decoded, strict=True) if text != again]
    assert len(changed) == (2 if kind == "tok512" else 0)
    assert all("  " in text for text in changed)


def test_special_strings_stay_text(tokenizer):
    text = f"{SPECIAL_STRINGS} and {SPECIAL_STRINGS}"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids & set(ids)
    assert {tokenizer.eos_id} <= tokenizer.special_ids


def test_special_ids_decode_to_nothing(tokenizer):
    ids = tokenizer.encode("Hello world")
    special = [token_id for token_id in (tokenizer.bos_id, tokenizer.eos_id) if token_id is not None]
    assert tokenizer.decode([*special, *ids, *special]) == "Hello world"


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_unknown_id_is_refused(tokenizer, wrong):
    with pytest.raises(UserError, match="outside this tokenizer's vocabulary"):
        tokenizer.decode([5, wrong])


def test_lone_surrogate_is_the_replacement_character(tokenizer):
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode_batch(["a\ud83d\ude00b"]) == [tokenizer.encode("a😀b")]


def test_stream_joins_to_decode_and_never_splits_a_character(tokenizer, c4):
    for text in [*ODD_TEXTS, "  two spaces", *c4[:20]]:
        ids = tokenizer.encode(text)
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids)
        assert all("\ufffd" not in part for part in parts)


def test_stream_of_an_emoji_waits_for_its_last_byte(tokenizer):
    ids = tokenizer.encode("a🤯")
    parts = streamed(tokenizer, ids)
    assert len(ids) > 2
    assert [part for part in parts if part] in (["a", "🤯"], ["a🤯"])


def test_stream_of_random_ids_joins_to_decode(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["llama-2", "tok512", "mistral-v3"])
def test_random_ids_decode_as_sentencepiece_does(name, loaded, paths):
    """Leading spaces, broken byte runs and control symbols, wherever they fall."""
    from sentencepiece import SentencePieceProcessor

    reference = SentencePieceProcessor(model_file=str(paths[name]))
    rng = random.Random(1)
    space = reference.piece_to_id("▁")
    usual = [i for i in range(reference.vocab_size()) if not reference.is_unknown(i)]
    pool = [space] * 30 + [i for i in usual if reference.is_byte(i)] + rng.choices(usual, k=200)
    for _ in range(300):
        ids = [i for i in rng.choices(pool, k=30) if not reference.is_control(i)]
        ids = [space] * rng.randrange(4) + ids
        assert loaded[name].decode(ids) == reference.decode(ids)


def test_long_texts_are_cut_without_changing_ids(kind, tokenizer, c4):
    text = " ".join(c4)[:200_000]
    if kind in ("gpt2", "gpt-neox"):
        assert len(cut_exactly(text)) > 5
        whole = tokenizer._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    elif kind != "llama-3":
        whole = tokenizer._processor.encode(text)
    else:
        whole = tokenizer._encoding.encode_ordinary(text)
    assert tokenizer.encode(text) == whole
    assert tokenizer.encode_batch(["x", text]) == [tokenizer.encode("x"), whole]


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama-2", "llama-3", "gpt2"])
def test_time_of_one_huge_line_is_linear(name, loaded, c4):
    text = " ".join(c4).replace("\n", " ")
    text = (text * (5_000_000 // len(text) + 1))[:5_000_000]

    def seconds(part: str) -> float:
        start = time.process_time()
        loaded[name].encode(part)
        return time.process_time() - start

    # Ten times the text: 10 where time is linear, 100 where it is quadratic; once more where neighbours disturb.
    assert any(seconds(text) <= 12 * max(seconds(text[:500_000]) for _ in range(2)) for _ in range(3))


def reference_split(text, limit=25_000, chunk=400_000):
    """Meta's rule, character by character: a cut wherever a run reaches one more than ``limit``."""
    for begin in range(0, len(text), chunk):
        part = text[begin : begin + chunk]
        start, length, space = 0, 0, part[0].isspace()
        for i, character in enumerate(part):
            if character.isspace() == space:
                length += 1
                if length > limit:
                    yield part[start:i]
                    start, length = i, 1
            else:
                space, length = not space, 1
        yield part[start:]


@pytest.mark.parametrize(
    "text",
    [
        "ab" * 12_500,
        "ab" * 12_500 + "c",
        "x " + " " * 25_000 + "y",
        "word " * 9 + "z" * 61_234 + " " * 52_000 + "\n\t tail",
        " " * 1_200_000 + "a",
        "é" * 437_000 + " end",
        "It is. " * 120_000,
        "\x1c\x1d\u3000" * 9000,
    ],
    ids=["25000", "25001", "spaces", "mixed", "1.2M spaces", "437k letters", "840k sentences", "odd spaces"],
)
def test_llama3_cuts_where_the_reference_does(loaded, text):
    parts = list(reference_split(text))
    assert reference_parts(text) == parts
    encoding = loaded["llama-3"]._encoding
    ids = [token_id for part in parts for token_id in encoding.encode_ordinary(part)]
    assert loaded["llama-3"].encode(text) == ids
    assert loaded["llama-3"].encode_batch([text, ""]) == [ids, []]
    assert loaded["llama-3"].decode(ids) == text


def test_pickled_tokenizer_is_the_same(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("Hello world") == tokenizer.encode("Hello world")
    assert again.fingerprint == tokenizer.fingerprint


def test_import_loads_no_tokenizer_library():
    libraries = {"torch", "numpy", "tokenizers", "sentencepiece", "tiktoken", "transformers"}
    code = f"import sys, llmstack.tokenizer; print(sorted({libraries} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_load_tokenizer_accepts_str(paths):
    assert load_tokenizer(str(paths["tok512"])).vocab_size == 512
