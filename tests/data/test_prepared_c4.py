"""Real C4 documents through real tokenizers of each kind, beside what the tokenizer says of each text by itself."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from llmstack.data import PreparedData, prepare_source
from llmstack.data.prepared import SPLITS
from llmstack.tokenizer import BosEosPolicy, Tokenizer, load_tokenizer

TOKENIZERS = {
    "llama-3": "tokenizers/llama-3/tokenizer.model",
    "llama-2": "tokenizers/llama-2/tokenizer.model",
    "gpt2": "tokenizers/gpt2",
    "tok512": "checkpoints/stories260K/tok512.model",
}
UNIT_BYTES = 300_000  # eight units


def normalised(text: str, tokenizer: Tokenizer) -> str:
    """What SentencePiece makes of a text before it looks for pieces (tok512: runs of spaces are one, none outside)."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer._files["tokenizer.model"])
    return str(model.normalize(text)).removeprefix("\u2581").replace("\u2581", " ")


def documents(prepared: PreparedData, split: str) -> list[list[int]]:
    """Ids of each document, cut where the stream says that the next one begins."""
    data = prepared[split]  # type: ignore[index]
    ids = data.read(0, data.num_tokens).numpy()
    borders = np.flatnonzero(np.diff(data.document_ids(0, data.num_tokens).numpy())) + 1
    return [part.tolist() for part in np.split(ids, borders)]


@pytest.mark.parametrize(
    "name", ["llama-3", "tok512", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama-2", "gpt2"))]
)
def test_the_stream_is_the_sources(shared: Path, tmp_path: Path, name: str) -> None:
    """Every text comes back whole, once; each is closed by one EOS; one process or two write the same bytes."""
    tokenizer = load_tokenizer(shared / TOKENIZERS[name])
    policy = BosEosPolicy.default(tokenizer)
    source = shared / "c4" / "c4_en_valid_1k.jsonl"
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    prepared = [
        prepare_source(source, tokenizer, policy, out=tmp_path / str(n), num_proc=n, unit_bytes=UNIT_BYTES)
        for n in (1, 2)
    ]
    digests = [
        {str(p.relative_to(one.folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in one.folder.rglob("*.*")}
        for one in prepared
    ]
    assert digests[0] == digests[1]
    assert len(prepared[0].index["splits"]["train"]["shards"]) == 8
    found = [ids for split in SPLITS for ids in documents(prepared[0], split)]
    assert len(found) == 1000
    assert sum(ids.count(tokenizer.eos_id) for ids in found) == 1000
    assert all(ids[-1] == tokenizer.eos_id for ids in found)
    expected = [normalised(text, tokenizer) for text in texts] if name == "tok512" else texts
    assert sorted(tokenizer.decode(ids) for ids in found) == sorted(expected)
    highest = max(max(ids) for ids in found)
    assert (highest > 65_535) == (name == "llama-3"), highest
