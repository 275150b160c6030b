"""Named data sets, benchmarks and tokenizers: where they lie in a folder that is laid out as the hub.

The folder (``$LLMSTACK_DATA``, or ``~/.cache/llmstack/hub``) holds ``<owner>/<name>/<files>``. ``llmstack fetch`` fills
it on a node with internet; everything else looks into it and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmstack.errors import UserError


@dataclass(frozen=True)
class HubSet:
    """Files of one repository of the hub."""

    repo: str
    """``<owner>/<name>``."""
    files: Mapping[str, str]
    """Glob pattern of each split; of a benchmark or tokenizer all under ``all``."""
    kind: Literal["dataset", "model"] = "dataset"
    note: str = ""
    """What has to be known before it can be had."""


_TOKENIZER_FILES = {"all": "*token*|vocab.json|merges.txt"}
_GATED = "its owner wants conditions accepted on the hub, and HF_TOKEN set"


CORPORA: Mapping[str, HubSet] = {
    "c4": HubSet("allenai/c4", {"train": "en/c4-train.*.json.gz", "validation": "en/c4-validation.*.json.gz"}),
    "wikitext2": HubSet(
        "Salesforce/wikitext",
        {split: f"wikitext-2-raw-v1/{split}-*.parquet" for split in ("train", "validation", "test")},
    ),
    "tinystories": HubSet(
        "roneneldan/TinyStories", {split: f"data/{split}-*.parquet" for split in ("train", "validation")}
    ),
    "openwebtext": HubSet("Skylion007/openwebtext", {"train": "plain_text/train-*.parquet"}),
    "lima": HubSet("GAIR/lima", {"train": "train.jsonl", "test": "test.jsonl"}, note=_GATED),
}

BENCHMARKS: Mapping[str, HubSet] = {
    "arc": HubSet("allenai/ai2_arc", {"all": "ARC-*/*.parquet"}),
    "boolq": HubSet("aps/super_glue", {"all": "boolq/*.parquet"}),
    "commonsense_qa": HubSet("tau/commonsense_qa", {"all": "*.parquet"}),
    "copa": HubSet("aps/super_glue", {"all": "copa/*.parquet"}),
    "glue": HubSet("nyu-mll/glue", {"all": "rte/*.parquet|qnli/*.parquet|sst2/*.parquet"}),
    "hellaswag": HubSet("Rowan/hellaswag", {"all": "*.parquet"}),
    "lambada": HubSet("EleutherAI/lambada_openai", {"all": "default/*|data/lambada_test_en.jsonl"}),
    "mmlu": HubSet("cais/mmlu", {"all": "*/dev-*.parquet|*/validation-*.parquet|*/test-*.parquet"}),
    "openbookqa": HubSet("allenai/openbookqa", {"all": "main/*.parquet"}),
    "piqa": HubSet("baber/piqa", {"all": "*.parquet|*.jsonl"}),
    "sciq": HubSet("allenai/sciq", {"all": "*.parquet"}),
    "siqa": HubSet("allenai/social_i_qa", {"all": "*.parquet"}),
    "wikitext": HubSet("EleutherAI/wikitext_document_level", {"all": "wikitext-2-raw-v1/*"}),
    "winogrande": HubSet("allenai/winogrande", {"all": "winogrande_xl/*.parquet"}),
}

TOKENIZERS: Mapping[str, HubSet] = {
    "gpt2": HubSet("openai-community/gpt2", _TOKENIZER_FILES, "model"),
    "llama-2": HubSet("meta-llama/Llama-2-7b-hf", _TOKENIZER_FILES, "model", _GATED),
    "llama-3": HubSet("meta-llama/Llama-3.2-1B", _TOKENIZER_FILES, "model", _GATED),
}

GROUPS = {"corpora": CORPORA, "benchmarks": BENCHMARKS, "tokenizers": TOKENIZERS}


def hub_root() -> Path:
    """``$LLMSTACK_DATA``, or ``~/.cache/llmstack/hub``."""
    return Path(os.environ.get("LLMSTACK_DATA") or "~/.cache/llmstack/hub").expanduser()


def find_source(entries: Sequence[str]) -> list[str | Path]:
    """Files for each entry that names a corpus and does not exist as a path, as ``c4`` (its training split) or
    ``c4:validation``; other entries as they are.

    Raises:
        UserError: the corpus, or the split, is not in the folder.
    """
    found: list[str | Path] = []
    for entry in entries:
        name, _, split = entry.partition(":")
        if name in CORPORA and not Path(entry).exists():
            found += find_split(name, split or "train")
        else:
            found.append(entry)
    return found


def find_split(name: str, split: str) -> list[Path]:
    """The files of a split of a corpus, sorted.

    Raises:
        UserError: no such split, or it is not in the folder.
    """
    hub_set = CORPORA[name]
    if split not in hub_set.files:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(hub_set.files)}")
    folder = hub_root() / hub_set.repo
    files = sorted(folder.glob(hub_set.files[split]))
    if not files:
        raise UserError(f"{name}: no {hub_set.files[split]} in {folder}; {_how_to_fetch(name)}")
    return files


def find_tokenizer(name: str) -> str | Path:
    """The folder of a tokenizer that is named as in the catalogue and does not exist as a path; else ``name``.

    Raises:
        UserError: it is not in the folder.
    """
    if not name:
        raise UserError("an empty name is no tokenizer")
    if name not in TOKENIZERS or Path(name).exists():
        return name
    folder = hub_root() / TOKENIZERS[name].repo
    if not folder.is_dir():
        raise UserError(f"tokenizer {name}: {folder} does not exist; {_how_to_fetch(name)}")
    return folder


def _how_to_fetch(name: str) -> str:
    return f"on a node with internet, run llmstack fetch --what {name}, and set LLMSTACK_DATA to its folder"
