"""``llmstack bench norm``: what the norms of a block cost, beside a copy and beside RMSNorm."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from llmstack.cli.parsing import output_file


def add_parser(subparsers: Any) -> None:
    """Register ``norm``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "norm",
        help="the norms of a block: time, GB/s and ratio to RMSNorm",
        description="Time (ms) of every norm method at its sites before attention and MLP and of all norms of a block, "
        "forward (without gradients) and forward + backward, eager and compiled; on the GPU if there is one. Beside it "
        "GB/s (10^9 bytes that have to be read and written: x, y, parameters; backward dy, x, dx, parameters and their "
        "gradients), their share of what a copy gets, and the ratio to RMSNorm with its 95 %% interval. Methods that "
        "remove their norm are measured in each phase. The last line of output is JSON (seconds, bytes).",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="sequences (default: 16 on a GPU, 2 on a CPU)")
    parser.add_argument("--seq", type=int, default=1024, metavar="N", help="tokens of each (default: %(default)s)")
    width = parser.add_mutually_exclusive_group()
    width.add_argument("--hidden", type=int, metavar="N", help="numbers of each token (default: that of --preset)")
    width.add_argument("--preset", default="374m", metavar="NAME", help="model size (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of inputs and parameters (default: %(default)s)"
    )
    parser.add_argument(
        "--methods", metavar="A,B", help="norm methods (default: all but those that mix others by layer)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        metavar="N",
        help="timed rounds per figure, at least 6 (default: %(default)s)",
    )
    parser.add_argument("--output", type=output_file, metavar="F.json", help="also write the JSON to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print tables and JSON; raises UserError for whatever is wrong with the arguments."""
    import torch

    from llmstack.bench.norm import Shape, as_text, measure, variants
    from llmstack.checkpoint.files import write_atomically
    from llmstack.model import ModelConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default_batch = 16 if device.type == "cuda" else 2
    shape = Shape(
        default_batch if args.batch is None else args.batch,
        args.seq,
        ModelConfig.preset(args.preset).hidden_size if args.hidden is None else args.hidden,
    )
    measured = measure(
        variants(args.methods.split(",") if args.methods is not None else None),
        shape,
        {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype],
        device,
        args.repeats,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(as_text(measured))
    text = json.dumps(measured)
    print(text)
    if args.output is not None:
        write_atomically(args.output, text + "\n")
    return 0
