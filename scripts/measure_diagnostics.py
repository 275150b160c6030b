"""What looking inside a model costs: ``python scripts/measure_diagnostics.py``, by default that of the quickstart.

Times compiled training steps, and between them looks (what ``diagnostics.csv`` takes: one forward pass of two rows, and
the norms of the gradients), in turn. The share is the time of one look over that of ``--every`` steps; medians, and
the first ones, which load and compile, are left out. Needs torch, safetensors and PyYAML alone. The last line is JSON.
"""

import argparse
import json
import statistics
import time

import torch

from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.training.diagnostics import diagnose, gradient_norms
from llmstack.training.optim import OptimizerConfig, build_optimizer, clip_gradients
from llmstack.training.step import micro_batch_loss


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="size (default: %(default)s)")
    parser.add_argument("--norm", default="bhyt", help="norm method (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=1024, help="vocabulary (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens in each (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between two looks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="looks, each after 4 steps (default: %(default)s)")
    parser.add_argument("--attention", action="store_true", help="the entropy of attention, too")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Llama(ModelConfig.preset(options.preset, vocab_size=options.vocab, norm={"method": options.norm}))
        tokens = torch.randint(0, options.vocab, (options.batch, options.length + 1))
    compile_model(model)
    optimizer = build_optimizer(model, OptimizerConfig())
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "valid_tokens": tokens[:, 1:].numel()}

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=options.device == "cuda"):
            loss, _ = micro_batch_loss(model, batch)
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()

    def look() -> None:
        gradient_norms(model, lambda parameter: parameter.grad)
        with torch.autocast("cuda", torch.bfloat16, enabled=options.device == "cuda"):
            diagnose(model, batch, eos_id=0, attention=options.attention)

    seconds: dict[str, list[float]] = {"step": [], "look": []}
    for _ in range(options.rounds + 1):
        for name, work in (*[("step", step)] * 4, ("look", look)):
            began = time.perf_counter()
            work()
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    steps, looks = seconds["step"][4:], seconds["look"][1:]
    one_step, one_look = statistics.median(steps), statistics.median(looks)
    result = {
        **{
            name: getattr(options, name)
            for name in ("preset", "norm", "vocab", "batch", "length", "every", "attention")
        },
        "step_seconds": round(one_step, 5),
        "look_seconds": round(one_look, 5),
        "first_look_seconds": round(seconds["look"][0], 3),
        "share_percent": round(100 * one_look / (options.every * one_step), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
