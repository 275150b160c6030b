"""The data of a run as a LightningDataModule: a source, a tokenizer and the batches that come of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
from torch.utils.data import DataLoader

from llmstack.data import (
    EMBEDDED,
    BestFitBlocks,
    EvaluationBatchSampler,
    KeyedSamples,
    PackedBlocks,
    PreparedData,
    SampleOrder,
    Source,
    Split,
    StepBatchSampler,
    TaskDataset,
    collate,
    prepare_source,
)
from llmstack.data.embedded import embedded_tokenizer
from llmstack.data.mixture import LaidEndToEnd, MixtureOrder, whole_shares
from llmstack.data.prepare import print_report
from llmstack.data.prepared import TOKENIZER
from llmstack.data.remote import local_folder
from llmstack.data.sources import describe_source, resolve_files
from llmstack.data.stream import Place, StreamLoader, StreamMicroBatches, StreamSource, hashes_of
from llmstack.errors import UserError
from llmstack.hub import find_source, find_tokenizer
from llmstack.processes import leave_stopping_to_parent
from llmstack.tokenizer import BosEosPolicy, Tokenizer, load_tokenizer

TASK_SAMPLES = {"train": 1_000_000, "heldout": 500}
"""Samples of the generated tasks; a sample costs nothing until it is asked for."""


MOST_WORKERS = 16
"""A core; more would only take memory."""
PREFETCHED = 4
"""Micro-batches that a worker has ready: enough for a validation or a save to end before the device waits."""


class LanguageData(L.LightningDataModule):
    """Packed blocks of text, or generated tasks.

    Args:
        source: `embedded` (the language reference inside CPython), `text` (files), `prepared` (what `llmstack prepare`
            has made), `stream` (files that are tokenised while training goes on), or the generated `copy` or `sort`.
        folder: for `prepared`: its folder, or its address (s3://…), from which it is copied into the cache.
        mixture: for `prepared`, instead of `folder`: several folders, each with its weight, the share of the tokens
            that it gives.
        files: for `text` and `stream`: a path, glob or folder, or a list of them; .txt, .jsonl (also .gz, .zst) or
            .parquet; or the name of a fetched set (`c4`, `c4:validation`).
        heldout_files: files of the held-out split, which is never trained on; null: a part of `files`.
        tokenizer: tokenizer file or folder; for `embedded` it may be left out: a small BPE is trained on the spot;
            `prepared` data have theirs with them.
        embedded_vocab_size: size of that BPE.
        text_field: field of JSON lines or column of Parquet that holds the text.
        block_size: tokens per sample (the generated tasks have their own).
        micro_batch_size: samples per device and forward pass.
        document_masks: attention stays within documents and positions restart at each.
        packing: `concatenate` (blocks are cut from the stream of all documents) or `best_fit` (documents whole, as many
            as fit a block, the rest filled up: for sets of short documents; needs `document_masks`).
        num_workers: processes of each rank that read data; 0: the training process itself; null: by the machine, with a
            line that says why. A stream goes on with as many ranks and workers as it had.
        seed: seed of the order of samples.
    """

    def __init__(
        self,
        source: Literal["embedded", "text", "prepared", "stream", "copy", "sort"] = "embedded",
        folder: str | None = None,
        mixture: dict[str, float] | None = None,
        files: str | list[str] | None = None,
        heldout_files: str | list[str] | None = None,
        tokenizer: str | None = None,
        embedded_vocab_size: int = 2048,
        text_field: str = "text",
        block_size: int = 256,
        micro_batch_size: int = 4,
        document_masks: bool = False,
        packing: Literal["concatenate", "best_fit"] = "concatenate",
        num_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("block_size", block_size), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise UserError(f"data.{name} is {value}; it must be at least 1")
        most = MOST_WORKERS * len(os.sched_getaffinity(0))
        if num_workers is not None and not 0 <= num_workers <= most:
            raise UserError(f"data.num_workers is {num_workers}; it must be 0 to {most} on this machine")
        if source in ("copy", "sort") and document_masks:
            raise UserError(f"data.document_masks is set, but a sample of data.source {source} is one document")
        _check_source(source, files, heldout_files, tokenizer, folder, mixture)
        if packing == "best_fit":
            _check_best_fit(source, mixture, document_masks)
        self.source, self.files, self.heldout_files = source, files, heldout_files
        self.weights = mixture if folder is None else {folder: 1.0}
        """Prepared folders with their weights; None: another source."""
        self.tokenizer_path, self.text_field = tokenizer, text_field
        self.embedded_vocab_size, self.block_size = embedded_vocab_size, block_size
        self.micro_batch_size, self.document_masks, self.packing = micro_batch_size, document_masks, packing
        self.num_workers = num_workers
        self.seed = seed
        self.first_step = 0
        """Optimiser steps tried before this start of the run."""
        self.first_sample = 0
        """Samples that those took."""
        self.stream_places: list[dict[str, Any]] = []
        """Where each lane of this rank stood then; none: at the start."""
        self._stream: StreamLoader | None = None
        self.tokenizer: Tokenizer | None = None
        self.policy: BosEosPolicy | None = None
        self.prepared: list[PreparedData] = []
        """All sets of text."""
        self._train: Any = None
        self._heldout: Any = None
        self._order: Any = None

    def prepare_data(self) -> None:
        """Tokenise once, on one process of each node; the others find it in the cache."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        """Open the data (tokenising it unless the cache has it) and cut it into samples."""
        if self._train is not None:
            return
        if self.source in ("copy", "sort"):
            self._train = TaskDataset(self.source, "train", TASK_SAMPLES["train"], self.seed)
            self._order = SampleOrder(len(self._train), self.seed)
            self._heldout = TaskDataset(self.source, "heldout", TASK_SAMPLES["heldout"], self.seed)
            self.vocab_size, self.block_size = self._train.vocab_size, self._train.block_size
            self.fingerprint = f"{self.source}-{self.block_size}"
            return
        if self.source == "stream":
            self._set_up_stream()
            return
        self.prepared, self.tokenizer, self.policy = self._prepared()
        self.vocab_size = self.tokenizer.vocab_size
        weights = list(self.weights.values()) if self.weights is not None else [1.0]
        whole_shares(weights)
        train = [self._blocks(one, "train") for one in self.prepared]
        heldout = [self._blocks(one, "heldout") for one in self.prepared]
        if len(self.prepared) == 1:
            (self._train,), (self._heldout,) = train, heldout
            self._order = SampleOrder(len(self._train), self.seed)
            identity = self.prepared[0].identity
        else:
            self._train, self._heldout = LaidEndToEnd(train), LaidEndToEnd(heldout)
            self._order = MixtureOrder([len(blocks) for blocks in train], weights, self.seed)
            parts = [[one.identity, share] for one, share in zip(self.prepared, self._order.shares, strict=True)]
            identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self.fingerprint = f"{identity[:32]}-{self.block_size}"
        if self.packing != "concatenate":
            self.fingerprint += f"-{self.packing}"

    def _blocks(self, prepared: PreparedData, split: Split) -> PackedBlocks | BestFitBlocks:
        """The samples of a split; for evaluation all of its tokens."""
        if self.packing == "best_fit":
            return BestFitBlocks(prepared, split, self.block_size)
        return PackedBlocks(prepared, split, self.block_size, split == "heldout", self.document_masks)

    def _prepared(self) -> tuple[list[PreparedData], Tokenizer, BosEosPolicy]:
        """The tokens, and what they were made with."""
        if self.weights is not None:
            return open_sets(list(self.weights))
        if self.tokenizer_path is None:
            tokenizer = embedded_tokenizer(self.embedded_vocab_size)
        else:
            tokenizer = load_tokenizer(find_tokenizer(self.tokenizer_path))
        policy = BosEosPolicy.default(tokenizer)
        files: Source = EMBEDDED if self.source == "embedded" else _found(self.files)
        heldout = _found(self.heldout_files) if self.heldout_files else None
        prepared = prepare_source(files, tokenizer, policy, self.text_field, heldout)
        return [prepared], tokenizer, policy

    def _set_up_stream(self) -> None:
        """Nothing is read but the held-out files."""
        assert self.tokenizer_path is not None
        self.tokenizer = load_tokenizer(find_tokenizer(self.tokenizer_path))
        self.policy = BosEosPolicy.default(self.tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        heldout = _found(self.heldout_files)
        self.prepared = [prepare_source([], self.tokenizer, self.policy, self.text_field, heldout)]
        self._train = StreamSource(
            tuple(resolve_files(_found(self.files))),
            self.tokenizer,
            self.policy,
            self.text_field,
            hashes_of(resolve_files(heldout), self.text_field),
            self.block_size,
            self.document_masks,
            self.seed,
        )
        self._heldout = self._blocks(self.prepared[0], "heldout")
        described = [describe_source(_found(self.files)), self.prepared[0].identity, self.text_field]
        self.fingerprint = f"{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]}-{self.block_size}"

    def describe_mixture(self, num_samples: int | None = None) -> str | None:
        """What each set of a mixture is to give, or has given of the run's first samples; None: there is one set."""
        if not isinstance(self._order, MixtureOrder):
            return None
        counts = self._order.shares if num_samples is None else self._order.count(num_samples)
        total = max(sum(counts), 1)
        parts = [f"{one.folder} {100 * n / total:.2f} %" for one, n in zip(self.prepared, counts, strict=True)]
        if num_samples is None:
            return f"mixture, shares of the tokens: {', '.join(parts)}"
        return f"mixture, shares of the {num_samples * self.block_size:,} tokens so far: {', '.join(parts)}"

    def describe_packing(self) -> str | None:
        """What best-fit packing has made of the documents; None: there is none."""
        blocks = self._train
        if not isinstance(blocks, BestFitBlocks):
            return None
        return (
            f"best-fit packing: {blocks.num_documents:,} documents in {len(blocks):,} blocks of {blocks.block_size:,}, "
            f"{100 * blocks.waste:.2f} % filling; {blocks.num_cut:,} documents were longer than a block and are cut"
        )

    def samples_seen(self, steps: int) -> int:
        """Samples of the run that ``steps`` steps, made or skipped, have taken."""
        assert self.trainer is not None
        return self.first_sample + (steps - self.first_step) * self.samples_per_step(self.trainer)

    def places(self, steps: int) -> list[dict[str, Any]] | None:
        """Where each lane of this rank stands after ``steps`` tried steps; None: the data are no stream."""
        return None if self._stream is None else self._stream.places(steps)

    def state(self, trainer: L.Trainer) -> dict[str, Any]:
        """What makes up the sequence of samples, whatever was seen of it: a resumed run must find the same."""
        state: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "block_size": self.block_size,
            "order_seed": self.seed,
        }
        if self.source == "stream":
            state["lanes"] = (
                f"{trainer.world_size} ranks x {max(self.workers(trainer)[0], 1)} workers x {self.micro_batch_size}"
            )
        return state

    def samples_per_step(self, trainer: L.Trainer) -> int:
        """The global batch: micro-batch, micro-batches and ranks multiplied."""
        return self.micro_batch_size * trainer.accumulate_grad_batches * trainer.world_size

    def train_dataloader(self) -> Any:
        """Micro-batches from the first step of this start on, without end: the trainer counts the steps."""
        trainer = self.trainer
        assert trainer is not None
        if self.source == "stream":
            return self._stream_loader(trainer)
        sampler = StepBatchSampler(
            self._train,
            self._order,
            self.micro_batch_size,
            accumulate=trainer.accumulate_grad_batches,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            start_step=self.first_step,
            start_sample=self.first_sample,
        )
        return self._loader(self._train, sampler)

    def _stream_loader(self, trainer: L.Trainer) -> StreamLoader:
        workers, _ = self.workers(trainer)
        made = self.first_sample // (self.micro_batch_size * trainer.world_size)
        places = [Place(**place) for place in self.stream_places] or [Place()] * max(workers, 1)
        batches = StreamMicroBatches(
            self._train, self.micro_batch_size, trainer.world_size, trainer.global_rank, places, made
        )
        self._stream = StreamLoader(
            DataLoader(batches, batch_size=None, **self._loading(trainer)),
            trainer.accumulate_grad_batches,
            self.first_step,
            self.first_sample,
            print_report,
        )
        return self._stream

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        """All held-out tokens, in order."""
        trainer = self.trainer
        assert trainer is not None
        sampler = EvaluationBatchSampler(
            self._heldout, self.micro_batch_size, world_size=trainer.world_size, rank=trainer.global_rank
        )
        return self._loader(self._heldout, sampler)

    def _loader(self, samples: Any, sampler: Any) -> DataLoader[dict[str, Any]]:
        assert self.trainer is not None
        options = self._loading(self.trainer)
        return DataLoader(
            KeyedSamples(samples),
            batch_sampler=sampler,
            collate_fn=collate,
            persistent_workers=options["num_workers"] > 0,
            **options,
        )

    def _loading(self, trainer: L.Trainer) -> dict[str, Any]:
        workers, _ = self.workers(trainer)
        ahead = PREFETCHED if workers else None
        return {
            "num_workers": workers,
            "prefetch_factor": ahead,
            "pin_memory": _on_gpu(trainer),
            "worker_init_fn": leave_stopping_to_parent,
        }

    def workers(self, trainer: L.Trainer) -> tuple[int, str]:
        """Processes of each rank that read data, and why."""
        if self.num_workers is not None:
            return self.num_workers, "data.num_workers"
        if not _on_gpu(trainer):
            return 0, "the model computes on these cores, too"
        cores = len(os.sched_getaffinity(0)) // max(trainer.num_devices, 1)
        wanted = 4 if self.source == "stream" else 2
        what = "tokenise" if self.source == "stream" else "read tokens ahead of a GPU"
        return max(min(wanted, cores - 1), 1), f"{wanted} {what}; this node has {cores} cores a rank"

    def describe_loading(self, trainer: L.Trainer) -> str:
        """How batches come to the device."""
        workers, reason = self.workers(trainer)
        ahead = f", {PREFETCHED} micro-batches each ahead" if workers else ""
        pinned = "pinned memory" if _on_gpu(trainer) else "ordinary memory"
        return f"data loading: {workers} workers a rank ({reason}){ahead}, in {pinned}"

    def save_tokenizer(self, folder: Path) -> Path | None:
        """Write tokenizer and BOS/EOS policy to ``folder``; none where the data has no text."""
        if self.tokenizer is None:
            return None
        assert self.policy is not None
        self.tokenizer.save(folder, self.policy)
        return folder


def _check_source(
    source: str,
    files: str | list[str] | None,
    heldout_files: str | list[str] | None,
    tokenizer: str | None,
    folder: str | None,
    mixture: dict[str, float] | None,
) -> None:
    """Raise a :class:`UserError` where a source lacks what it needs, or is given what it has no use for."""
    reads_files = source in ("text", "stream")
    if reads_files and not files:
        raise UserError("data.files is not set: give --data.files a path, a glob or a folder")
    if reads_files and not tokenizer:
        raise UserError("data.tokenizer is not set: give --data.tokenizer a tokenizer file or folder")
    if source == "stream" and not heldout_files:
        raise UserError("data.heldout_files is not set: of a stream nothing can be held out but files of their own")
    for name, given in (("files", files), ("heldout_files", heldout_files)):
        if not reads_files and given:
            raise UserError(f"data.{name} is set, but data.source is {source}: set data.source to text")
    if source in ("copy", "sort") and tokenizer:
        raise UserError(f"data.tokenizer is set, but data.source {source} generates ids and has no text")
    if source == "prepared" and tokenizer:
        raise UserError("data.tokenizer is set, but prepared data have their tokenizer with them: leave it out")
    if (source == "prepared") != (bool(folder) != bool(mixture)):
        raise UserError(
            f"data.source is {source}, data.folder {folder or 'not set'} and data.mixture {mixture or 'not set'}: "
            "source prepared needs one of the two, and other sources have neither"
        )


def _check_best_fit(source: str, mixture: dict[str, float] | None, document_masks: bool) -> None:
    """Raise a :class:`UserError` where documents cannot be packed by their lengths."""
    if source not in ("embedded", "text", "prepared") or mixture:
        raise UserError("data.packing best_fit is for one set of tokens on disk: no stream, task or mixture")
    if not document_masks:
        raise UserError(
            "data.packing best_fit puts documents together by their lengths alone, so that none may look at "
            "another: set data.document_masks to true"
        )


def _on_gpu(trainer: L.Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def _found(files: str | list[str] | None) -> list[str | Path]:
    return find_source([files] if isinstance(files, str) else files or [])


def open_sets(folders: Sequence[str]) -> tuple[list[PreparedData], Tokenizer, BosEosPolicy]:
    """Prepared folders, and what all of them were made with.

    Raises:
        UserError: no prepared data there, or made with another tokenizer or other marks than the first.
    """
    opened = [PreparedData(local_folder(folder)) for folder in folders]
    for one in opened:
        one.verify_if_small()
    first = opened[0]
    if len({one.folder.resolve() for one in opened}) < len(opened):
        raise UserError("data.mixture: a folder stands there twice")
    for other in opened[1:]:
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint or other.index["policy"] != first.index["policy"]:
            raise UserError(
                f"{other.folder} was prepared with another tokenizer, or other BOS and EOS, than {first.folder}: "
                "prepare it anew"
            )
    tokenizer = load_tokenizer(first.folder / TOKENIZER)
    if tokenizer.fingerprint != first.tokenizer_fingerprint:
        raise UserError(f"{first.folder / TOKENIZER} is not the tokenizer that the data were prepared with")
    return opened, tokenizer, BosEosPolicy.from_dict(first.index["policy"])
