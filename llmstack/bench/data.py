"""What it costs to read prepared data and to make them: the loader alone, seeking, tokenising beside the library."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from llmstack.data import KeyedSamples, PackedBlocks, PreparedData, SampleOrder, StepBatchSampler, collate
from llmstack.data.sources import iterate_documents
from llmstack.errors import UserError
from llmstack.tokenizer import Tokenizer

SEEKS = 200
"""Reads of which the median is taken."""


def measure_reading(
    folder: Path, block_size: int, micro_batch_size: int, workers: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Opening, seeking and reading of prepared data; plain JSON values.

    Args:
        folder: prepared data.
        block_size: tokens of a sample.
        micro_batch_size: samples of a batch.
        workers: numbers of processes that read.
        seconds: for how long each of them reads.
    """
    opening = []
    for _ in range(5):
        start = time.perf_counter()
        blocks = PackedBlocks(PreparedData(folder), "train", block_size)
        opening.append(time.perf_counter() - start)
    order = SampleOrder(len(blocks), 0)
    return {
        "bench": "data",
        "folder": str(folder),
        "tokens": blocks.data.num_tokens,
        "block_size": block_size,
        "micro_batch_size": micro_batch_size,
        "cpus": len(os.sched_getaffinity(0)),
        "open_seconds": median(opening),
        "seek_seconds": {str(at): _seek(blocks, order, at) for at in (10, 10_000_000)},
        "loader": [_load(blocks, order, micro_batch_size, number, seconds) for number in workers],
    }


def _seek(blocks: PackedBlocks, order: SampleOrder, at: int) -> float:
    """Median seconds to find and read one sample, from sample ``at`` of the run on."""
    times = []
    for sample in range(at, at + SEEKS):
        start = time.perf_counter()
        blocks[int(order(np.array([sample]))[0])]
        times.append(time.perf_counter() - start)
    return median(times)


def _load(
    blocks: PackedBlocks, order: SampleOrder, micro_batch_size: int, workers: int, seconds: float
) -> dict[str, Any]:
    """Tokens per second of the loader alone, as training uses it, and what it costs in processor and memory."""
    sampler = StepBatchSampler(blocks, order, micro_batch_size)
    batches: Iterator[Any] = iter(
        DataLoader(KeyedSamples(blocks), batch_sampler=sampler, collate_fn=collate, num_workers=workers)
    )
    next(batches)
    memory = [_resident(pid) for pid in _children()] if workers else [_resident(os.getpid())]
    used, start, count = _processor_seconds(), time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        count += 1
    used = _processor_seconds() - used
    tokens = count * micro_batch_size * blocks.block_size
    return {
        "workers": workers,
        "tokens_per_second": tokens / elapsed,
        "own_processor_seconds_per_million_tokens": 1e6 * used / tokens,
        "resident_bytes_per_process": max(memory),
    }


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _children() -> list[int]:
    own = f"/proc/self/task/{os.getpid()}/children"
    return [int(pid) for pid in Path(own).read_text().split()] if Path(own).exists() else []


def _resident(pid: int) -> int:
    """Bytes that are this process's own and in memory; shared pages, as those of mapped files, apart."""
    try:
        resident, shared = (int(n) for n in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def measure_tokenising(source: Sequence[str], tokenizer: Tokenizer, repeats: int) -> dict[str, Any]:
    """Tokenising of all of ``source`` as `prepare` does it, beside the library's own batch call on the same text.

    Both use all cores by the library's threads, and take turns; the ratio is the median over pairs.
    """
    texts = [document.text for document in iterate_documents(list(source))]
    if not texts:
        raise UserError("no text to tokenise")
    num_bytes = sum(len(text.encode()) for text in texts)
    ours, theirs = list[float](), list[float]()
    for _ in range(repeats):
        ours.append(_timed(lambda: tokenizer.encode_batch(texts)))
        theirs.append(_timed(lambda: tokenizer.library_batch(texts)))
    return {
        "text_bytes": num_bytes,
        "mb_per_second": num_bytes / 1e6 / median(ours),
        "library_mb_per_second": num_bytes / 1e6 / median(theirs),
        "share_of_library": median([b / a for a, b in zip(ours, theirs, strict=True)]),
    }


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def as_text(measured: dict[str, Any]) -> str:
    """For a reader."""
    lines = []
    if "folder" in measured:
        lines += [
            f"{measured['folder']}: {measured['tokens']:,} tokens in blocks of {measured['block_size']}",
            f"opening {1e3 * measured['open_seconds']:.2f} ms; reading a sample from sample "
            + ", ".join(f"{int(at):,} on {1e3 * t:.3f} ms" for at, t in measured["seek_seconds"].items()),
        ]
        for loader in measured["loader"]:
            lines.append(
                f"loader with {loader['workers']} workers: {loader['tokens_per_second'] / 1e6:.2f} M tokens/s, "
                f"{loader['own_processor_seconds_per_million_tokens']:.3f} s of the training process's time per M "
                f"tokens, {loader['resident_bytes_per_process'] / 1e6:.0f} MB per process"
            )
    if "tokenising" in measured:
        one = measured["tokenising"]
        lines.append(
            f"tokenising {one['text_bytes'] / 1e6:.1f} MB: {one['mb_per_second']:.2f} MB/s, the library "
            f"{one['library_mb_per_second']:.2f} MB/s, ratio {one['share_of_library']:.3f}"
        )
    return "\n".join(lines)
