"""Our evaluation beside lm-eval's own Hugging Face backend: the same tasks, weights, tokens and threads, item by item.

    python scripts/compare_with_lm_eval.py CKPT --data-root DIR --tasks arc_easy,winogrande --num-fewshot 3
    python scripts/compare_with_lm_eval.py --random 30m --tokenizer T --tasks hellaswag --limit 200 --rounds 6

CKPT is a stock Hugging Face folder. Both sides take transformers' reading of its tokenizer. Every round runs both, in
an order that turns from round to round. A document agrees where all its metrics are equal; one that does not is listed
with the least gap between two of its choices, and the exit status is 1 where that is not below 1e-4. Needs the extra
`test`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from llmstack.bench.decode import huggingface_folder
from llmstack.bench.paired import FEWEST, median_interval, paired_ratio
from llmstack.evaluation.harness import HarnessModel
from llmstack.evaluation.tasks import OfflineTasks, by_itself
from llmstack.model import Llama, ModelConfig

CLOSE = 1e-4


def random_model(preset: str, tokenizer: str, positions: int) -> Llama:
    """Random weights, with the norm of stock Llama; large enough that choices differ."""
    vocab = -(-len(AutoTokenizer.from_pretrained(tokenizer)) // 64) * 64
    torch.manual_seed(0)
    config = ModelConfig.preset(preset, vocab_size=vocab, max_position_embeddings=positions, initialisation="fan_in")
    return Llama(config).eval()


def evaluated(model: Any, args: argparse.Namespace, manager: OfflineTasks) -> tuple[dict[str, Any], float]:
    """lm-eval's samples by task, and seconds."""
    began = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=args.tasks.split(","),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert found is not None
    return found["samples"], time.perf_counter() - began


def compare(task: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, list[str], bool]:
    """Documents that agree, what to say of the others, and whether each of these is a near-tie."""
    agreeing, lines, close = 0, [], True
    for own, other in zip(ours, theirs, strict=True):
        assert own["doc_hash"] == other["doc_hash"]
        assert own["prompt_hash"] == other["prompt_hash"]
        if all(own[metric] == other[metric] for metric in own["metrics"]):
            agreeing += 1
            continue
        scores = sorted(float(response[0]) for response in own["filtered_resps"])
        gap = min((high - low for low, high in pairwise(scores)), default=0.0)
        lines.append(f"  {task} document {own['doc_id']}: gap between choices {gap:.1e}; ours {scores}")
        close &= gap < CLOSE
    return agreeing, lines, close


def largest_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Of a log-probability."""
    pairs = [
        (float(a[0]), float(b[0]))
        for own, other in zip(ours, theirs, strict=True)
        for a, b in zip(own["filtered_resps"], other["filtered_resps"], strict=True)
    ]
    return max(abs(a - b) for a, b in pairs)


def main() -> int:
    """Print a line for each task, the times, and JSON as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ckpt", nargs="?", metavar="CKPT")
    parser.add_argument("--random", metavar="PRESET", help="random weights of this size, with --tokenizer")
    parser.add_argument("--tokenizer", metavar="DIR", help="Hugging Face tokenizer folder (default: CKPT's)")
    parser.add_argument("--max-length", type=int, metavar="N", help="window (default: 2048 with --random, else CKPT's)")
    parser.add_argument("--tasks", required=True, metavar="A,B")
    parser.add_argument("--data-root", required=True, metavar="DIR")
    parser.add_argument("--num-fewshot", type=int, default=3, metavar="N")
    parser.add_argument("--limit", type=int, metavar="N")
    parser.add_argument("--batch-size", default="8", metavar="N", help="of both (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help=f"timed, at least {FEWEST} for an interval")
    args = parser.parse_args()
    by_itself(progress=False)
    with ExitStack() as stack:
        folder, tokenizer = args.ckpt, args.tokenizer or args.ckpt
        if args.random:
            model = random_model(args.random, args.tokenizer, args.max_length or 2048)
            folder = str(stack.enter_context(huggingface_folder(model)))
        # Both sides use transformers' reading of the tokenizer.
        shared = stack.enter_context(tempfile.TemporaryDirectory())
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(shared)
        theirs = HFLM(
            pretrained=folder,
            tokenizer=shared,
            dtype="float32",
            device="cpu",
            batch_size=int(args.batch_size),
            max_length=args.max_length,
        )
        ours = HarnessModel(
            Path(folder),
            tokenizer=Path(shared) / "tokenizer.json",
            batch_size=args.batch_size,
            max_length=args.max_length,
        )
        manager = OfflineTasks(Path(args.data_root))
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        found: dict[str, Any] = {}
        for number in range(args.rounds):
            order = [("ours", ours), ("theirs", theirs)]
            for name, lm in order if number % 2 == 0 else reversed(order):
                found[name], seconds = evaluated(lm, args, manager)
                times[name].append(seconds)
                print(f"round {number + 1}: {name} {seconds:.1f} s", file=sys.stderr, flush=True)
    return report(found, times, args)


def report(found: dict[str, Any], times: dict[str, list[float]], args: argparse.Namespace) -> int:
    """Print what was found."""
    close, result = True, {}
    for task, own in found["ours"].items():
        other = found["theirs"][task]
        agreeing, lines, near = compare(task, own, other)
        difference = largest_difference(own, other)
        close &= near
        result[task] = {"documents": len(own), "agreeing": agreeing, "largest_difference": difference}
        print(f"{task}: {agreeing} of {len(own)} documents agree; largest difference of a score {difference:.1e}")
        print("\n".join(lines), end="\n" if lines else "")
    medians = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}
    ratio: Any = medians["theirs"] / medians["ours"]
    told = f"{ratio:.2f} times as fast"
    if args.rounds >= FEWEST:
        ratio = paired_ratio(times["theirs"], times["ours"])
        told = f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times as fast"
        medians = {name: median_interval(seconds).median for name, seconds in times.items()}
    print(
        f"ours {medians['ours']:.1f} s, lm-eval's {medians['theirs']:.1f} s: {told} ({torch.get_num_threads()} threads)"
    )
    print(json.dumps({"tasks": result, "seconds": times, "ratio": ratio}))
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
