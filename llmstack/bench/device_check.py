"""Is this device right, and how fast is it: norms, training step and decoding, in one table. Torch alone.

``scripts/gpu_check.sh`` runs it. What the device computes, compiled, is held against the same in plain PyTorch on the
CPU: each norm at full width, training and decoding with the widths of each preset and two layers, in fp32. Then the
whole presets are timed in bf16. A check that fails, or cannot be made, is a row of the table and stops no other.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from torch import Tensor

from llmstack.accounting.devices import model_flops_utilisation
from llmstack.accounting.flops import model_flops_per_token
from llmstack.bench.bandwidth import Clock, Copy
from llmstack.bench.decode import Variant as DecodeVariant
from llmstack.bench.decode import Work
from llmstack.bench.decode import measure as measure_decoding
from llmstack.bench.norm import BlockNorms, Operation, Shape, Variant, device_name, rounds, variants
from llmstack.errors import UserError
from llmstack.inference import Generator, Request
from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.training.optim import OptimizerConfig, build_optimizer, clip_gradients
from llmstack.training.step import micro_batch_loss

FP32_BOUND = 1e-4
"""Most that two fp32 results may differ, relative to the larger norm (log-probabilities: absolutely)."""
BF16_BOUND = 1e-2
"""The same where inputs, outputs and what lies between are rounded to bf16, 2^-9 each time."""
_ROUNDS = 6
_STEPS, _WARM_UP_STEPS = 6, 3
_LAYERS = 2
_VOCAB_SIZE = 32000
"""Of presets that take theirs from a tokenizer."""


@dataclass
class Result:
    """One row."""

    check: str
    error: float | None = None
    """Of the result against the CPU's; none: not compared."""
    bound: float | None = None
    speed: float | None = None
    unit: str = ""
    """Of ``speed``."""
    share: float | None = None
    """Of ``limit``."""
    limit: str = ""
    """What the device can do at most: the memory's rate of copying or reading, the datasheet's FLOP/s."""
    memory_bytes: int | None = None
    seconds: float = 0.0
    """That the check took, compiling included."""
    problem: str = ""
    """Why it failed; empty: it did not."""

    def judge(self) -> None:
        """Fail where the error exceeds its bound, or is not a number."""
        if self.error is not None and self.bound is not None and not self.error <= self.bound and not self.problem:
            self.problem = f"error {self.error:.2g} above {self.bound:.2g}"


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    batch: int
    seq: int
    new_tokens: int


def run(
    presets: Sequence[str],
    methods: Sequence[str] | None,
    size: Size,
    device: torch.device,
    progress: Callable[[str], None],
) -> list[Result]:
    """All checks, in order.

    Args:
        presets: model sizes; norms have the width of the first.
        methods: norm methods; none: all.
        size: of batches and answers.
        device: what is checked.
        progress: told what is next.
    """
    width = ModelConfig.preset(presets[0]).hidden_size
    jobs: list[tuple[str, Callable[[Result], None]]] = [
        (f"norm {variant}", lambda result, variant=variant: _norm(result, variant, width, size, device))  # type: ignore[misc]
        for variant in variants(methods)
    ]
    for preset in presets:
        for name, check in (
            ("training, 2 layers, fp32", _training_is_right),
            ("training, bf16", _training_speed),
            ("decoding, 2 layers, fp32", _decoding_is_right),
            ("decoding, bf16", _decoding_speed),
        ):
            config = ModelConfig.preset(preset)
            if config.vocab_size is None:
                config = replace(config, vocab_size=_VOCAB_SIZE)
            jobs.append(
                (f"{preset} {name}", lambda result, check=check, config=config: check(result, config, size, device))  # type: ignore[misc]
            )
    return [_result(name, job, device, progress) for name, job in jobs]


def _result(name: str, job: Callable[[Result], None], device: torch.device, progress: Callable[[str], None]) -> Result:
    progress(name)
    result, began = Result(name), time.perf_counter()
    # Graphs of the check before do not count against the compiler's limit.
    torch.compiler.reset()
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        job(result)
    except Exception as error:
        result.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    result.judge()
    if device.type == "cuda" and result.memory_bytes is None:
        result.memory_bytes = torch.cuda.max_memory_allocated(device)
    result.seconds = time.perf_counter() - began
    return result


def _norm(result: Result, variant: Variant, width: int, size: Size, device: torch.device) -> None:
    """All norms of a block, forward and backward, beside fp64 on the CPU; their rate beside a copy's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = Shape(size.batch, size.seq, width)
    norms = BlockNorms(variant, shape, dtype, device)
    with torch.no_grad():
        # Gains of 1 would hide a product that is missing.
        for parameter in (parameter for site in norms.sites() for parameter in site.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    operation = norms.operations("compiled")["block"]
    reference = _on_cpu(variant, shape, norms, operation)
    own = [operation.forward(), operation.forward_backward()]
    right = [reference.forward(), reference.forward_backward()]
    result.error = max(_relative_error(a, b) for a, b in zip(_flat(own), _flat(right), strict=True))
    result.bound = BF16_BOUND if dtype == torch.bfloat16 else FP32_BOUND
    copied = Copy(norms.x)
    times, copies = rounds([operation.forward_backward, copied], _ROUNDS, Clock(device))
    rate = operation.least_bytes("forward_backward") / median(times)
    result.speed, result.unit = rate / 1e9, "GB/s"
    result.share, result.limit = rate / (copied.bytes / median(copies)), "of a copy"


def _on_cpu(variant: Variant, shape: Shape, norms: BlockNorms, operation: Operation) -> Operation:
    """The same operation on the same numbers, in fp64 and eager."""
    cpu = torch.device("cpu")
    reference = BlockNorms(variant, shape, torch.float64, cpu)
    with torch.no_grad():
        for own, other in zip(norms.sites(), reference.sites(), strict=True):
            for source, target in zip(
                (*own.parameters(), *own.buffers()), (*other.parameters(), *other.buffers()), strict=True
            ):
                target.copy_(source)
    plain = reference.operations("eager")["block"]
    inputs = tuple(tensor.detach().to(cpu, torch.float64).requires_grad_() for tensor in operation.inputs)
    gradients = [
        gradient.to(cpu, other.dtype) for gradient, other in zip(operation.gradients, plain.gradients, strict=True)
    ]
    return replace(plain, inputs=inputs, gradients=gradients)


def _training_is_right(result: Result, config: ModelConfig, size: Size, device: torch.device) -> None:
    """Loss and all gradients of one micro-batch."""
    model = Llama(replace(config, num_layers=_LAYERS))
    batch = _batch(config, 2, min(size.seq, 64), torch.device("cpu"))
    other = compile_model(copy.deepcopy(model).to(device))
    losses = []
    for one, where in ((model, torch.device("cpu")), (other, device)):
        loss, _ = micro_batch_loss(one, _moved(batch, where))
        loss.backward()
        losses.append(loss.detach())
    result.error = max(
        _relative_error(losses[1], losses[0]),
        *(
            _relative_error(own.grad, right.grad)
            for own, right in zip(other.parameters(), model.parameters(), strict=True)
            if own.grad is not None and right.grad is not None
        ),
    )
    result.bound = FP32_BOUND


def _training_speed(result: Result, config: ModelConfig, size: Size, device: torch.device) -> None:
    """Optimiser steps on one batch, whose loss has to fall; the batch is halved until it fits into the memory."""
    with torch.device(device):
        model = Llama(config)
    compile_model(model)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-4))
    rows = size.batch
    while True:
        try:
            losses, seconds = _train(model, optimizer, _batch(config, rows, size.seq, device))
            break
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    tokens = rows * size.seq / median(seconds)
    result.speed, result.unit = tokens, "tokens/s"
    flops = tokens * model_flops_per_token(config, size.seq)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    result.share = model_flops_utilisation(flops, name, torch.bfloat16)
    result.limit = f"of peak, {flops / 1e12:.3g} TFLOP/s, batch {rows} x {size.seq}"
    if not losses[-1] < losses[0]:
        result.problem = f"the loss of one batch went from {losses[0]:.4f} to {losses[-1]:.4f}"


def _train(
    model: Llama, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor | int]
) -> tuple[list[float], list[float]]:
    """Losses, and seconds of each step after the first few."""
    device = model.embed_tokens.weight.device
    losses, seconds = [], []
    for _ in range(_WARM_UP_STEPS + _STEPS):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = micro_batch_loss(model, batch)
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the device
        seconds.append(time.perf_counter() - began)
    return losses, seconds[_WARM_UP_STEPS:]


def _decoding_is_right(result: Result, config: ModelConfig, size: Size, device: torch.device) -> None:
    """Log-probabilities of the tokens that the compiled step found after unequal prompts, and those of a full pass."""
    model = Llama(replace(config, num_layers=_LAYERS)).eval()
    generator = Generator(copy.deepcopy(model).to(device), 64, batch_size=2, compile=True, chunk=8)
    new = min(size.new_tokens, 16)
    prompts = [_ids(config, 1, length, torch.device("cpu"))[0].tolist() for length in (5, 20, 33)]
    answers = generator.generate([Request(prompt, new, logprobs=1) for prompt in prompts])
    errors = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.ids[:-1]]))[0, len(prompt) - 1 :]
        right = logits.log_softmax(-1)[torch.arange(new), torch.tensor(answer.ids)]
        found = torch.tensor(answer.logprobs)
        # The greedy id has to be the CPU's, or one as probable up to rounding.
        errors += [float((found - right).abs().max()), float((logits.log_softmax(-1).amax(-1) - right).max())]
    result.error, result.bound = max(errors), FP32_BOUND


def _decoding_speed(result: Result, config: ModelConfig, size: Size, device: torch.device) -> None:
    """One row, greedy."""
    with torch.device(device):
        model = Llama(config)
    model.to(torch.bfloat16).eval()
    work = Work(batch=1, context=32 + size.new_tokens, prompt=32, new=size.new_tokens)
    measured = measure_decoding(model, [DecodeVariant(config.norm_method.name)], [], [work], _ROUNDS, lambda _: None)
    (found,) = measured["results"]
    result.speed, result.unit = found["decode_tokens_per_second"], "tokens/s"
    result.share = found["share_of_read"]
    result.limit = f"of reading, {found['read_gb_per_second']:.0f} GB/s, started in {found['start_seconds']:.0f} s"


def _ids(config: ModelConfig, batch: int, seq: int, device: torch.device) -> Tensor:
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (batch, seq)).to(device)


def _batch(config: ModelConfig, rows: int, seq: int, device: torch.device) -> dict[str, Tensor | int]:
    ids = _ids(config, rows, seq + 1, device)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "valid_tokens": rows * seq}


def _moved(batch: dict[str, Tensor | int], device: torch.device) -> dict[str, Tensor | int]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _relative_error(found: Tensor, right: Tensor) -> float:
    """‖found - right‖ / ‖right‖ in fp64 on the CPU."""
    found, right = found.detach().double().cpu(), right.detach().double().cpu()
    scale = float(right.norm())
    distance = float((found - right).norm())
    return distance / scale if scale else distance


def _flat(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)


def as_text(results: Sequence[Result], device: torch.device) -> str:
    """The table."""
    width = max(len(result.check) for result in results)
    lines = [
        f"{device_name(device)}, torch {torch.__version__}; error: relative, against the CPU",
        f"{'':{width}} {'error':>8} {'bound':>8} {'speed':>19} {'share':>6} {'GB':>6} {'s':>5}",
    ]
    lines += [_line(one, width) for one in results]
    return "\n".join(lines)


def _line(one: Result, width: int) -> str:
    cells = (
        f"{'' if one.error is None else f'{one.error:.1e}':>8}",
        f"{'' if one.bound is None else f'{one.bound:.0e}':>8}",
        f"{'' if one.speed is None else f'{one.speed:,.1f} {one.unit}':>19}",
        f"{'' if one.share is None else f'{100 * one.share:.0f} %':>6}",
        f"{'' if one.memory_bytes is None else f'{one.memory_bytes / 1e9:.1f}':>6}",
        f"{one.seconds:5.0f}",
    )
    verdict = f"FAILED: {one.problem}" if one.problem else "ok"
    return f"{one.check:{width}} {' '.join(cells)}  {verdict}  {one.limit}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and, as the last line, the same as JSON; 1 if a check failed."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Correctness and speed of norms, training step and decoding on the GPU (without one: on the CPU). "
        "Needs torch, safetensors and PyYAML. The last line of output is JSON; exit status 1 if a check failed.",
    )
    parser.add_argument("--presets", default="374m,1b", metavar="A,B", help="model sizes (default: %(default)s)")
    parser.add_argument("--methods", metavar="A,B", help="norm methods (default: all)")
    parser.add_argument(
        "--batch", type=int, default=8 if gpu else 2, metavar="N", help="sequences of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--seq", type=int, default=1024 if gpu else 128, metavar="N", help="tokens of each (default: %(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=128, metavar="N", help="tokens to decode, at least 2 (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    device, began = torch.device("cuda" if gpu else "cpu"), time.perf_counter()
    try:
        for name, least in (("batch", 1), ("seq", 1), ("new_tokens", 2)):
            if getattr(args, name) < least:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
        results = run(
            args.presets.split(","),
            args.methods.split(",") if args.methods is not None else None,
            Size(args.batch, args.seq, args.new_tokens),
            device,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    except UserError as error:
        print(f"gpu_check.sh: {error}", file=sys.stderr)
        return 2
    failed = [result.check for result in results if result.problem]
    print(as_text(results, device))
    print(f"{len(results)} checks in {time.perf_counter() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    print(
        json.dumps(
            {
                "bench": "device_check",
                "device": device_name(device),
                "torch": torch.__version__,
                "failed": failed,
                "results": [asdict(result) for result in results],
            }
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
