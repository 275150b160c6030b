"""Where a training step's time and memory go: ``python scripts/profile_step.py --preset 374m --batch 2 --length 512``.

``--plain`` is the step as a straightforward implementation makes it: nothing compiled, full logits in fp32 and
``F.cross_entropy`` over them. Needs torch, safetensors and PyYAML alone. The last line is JSON.
"""

import argparse
import json
import resource
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from llmstack.accounting import model_flops_per_token
from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.training.optim import OptimizerConfig, build_optimizer, clip_gradients
from llmstack.training.step import micro_batch_loss

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "mkldnn"),
    "attention": ("scaled_dot_product",),
    "optimiser": ("adamw",),
    "compiled (norms, MLP, rotary, loss)": ("CompiledFxGraph", "graph_"),
    "softmax over the vocabulary": ("log_softmax", "nll_loss", "cross_entropy"),
    "copies, casts and zero-filling": ("copy_", "zero_", "fill_", "aten::_to_copy", "clone"),
    "embedding": ("embedding",),
    "gradient norm": ("norm",),
}


def plain_loss(model: Llama, batch: dict[str, Any]) -> torch.Tensor:
    """Full logits, fp32, one call."""
    logits = model(batch["input_ids"]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def kind_of(name: str) -> str:
    """The row of the table that an operation belongs to."""
    return next((kind for kind, marks in KINDS.items() if any(mark in name for mark in marks)), "other")


def main() -> None:
    """Time some steps, profile one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="374m", help="size (default: %(default)s)")
    parser.add_argument("--norm", default="rmsnorm", help="norm method (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=128256, help="vocabulary (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens in each (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the compute (default: bf16)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, untimed (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, the last profiled (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="the straightforward step")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Llama(ModelConfig.preset(options.preset, vocab_size=options.vocab, norm={"method": options.norm}))
    if not options.plain:
        compile_model(model)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.randint(0, options.vocab, (options.batch, options.length + 1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "valid_tokens": tokens[:, 1:].numel()}

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = plain_loss(model, batch) if options.plain else micro_batch_loss(model, batch)[0]
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        last = number + 1 == options.warmup + options.steps
        with profile(activities=[ProfilerActivity.CPU]) if last else nullcontext() as profiler:
            began = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - began)
    assert profiler is not None
    shares: Counter[str] = Counter()
    for event in profiler.key_averages():
        shares[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    timed = sorted(seconds[options.warmup :])
    median = timed[len(timed) // 2]
    for kind, time_spent in shares.most_common():
        print(f"{kind:40} {time_spent:8.2f} s  {100 * time_spent / sum(shares.values()):5.1f} %")
    count = options.batch * options.length
    flops = model_flops_per_token(model.config, options.length, "palm") * count
    result = {
        **{name: getattr(options, name) for name in ("preset", "norm", "dtype", "plain", "batch", "length")},
        "step_seconds": [round(value, 2) for value in seconds],
        "tokens_per_second": round(count / median, 1),
        "gflop_per_second_palm": round(flops / median / 1e9, 1),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "losses": [round(value, 4) for value in losses],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
