"""What the norms of a block cost: each site by itself, and all of a block, without attention and MLP.

Bytes are those that the operation cannot do without, by convention:

    forward             x, y and the parameters, each once
    backward            dy, x and dx; the parameters and their gradients

where x are all inputs of the site and y all its outputs: what one site hands to the other of its block (BHyT's mean
square) belongs to both of them, but not to the block as a whole, and a site with two outputs (FakeLN before attention)
writes both. Time is the median over rounds. A round times the method, RMSNorm at the same place and a copy of x next to
one another, so that whatever disturbs the machine disturbs all three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from llmstack.bench.bandwidth import Clock, Copy, bytes_of
from llmstack.bench.paired import FEWEST, paired_ratio
from llmstack.errors import UserError
from llmstack.model import ModelConfig
from llmstack.model.norms import METHODS
from llmstack.model.norms.fake_ln import FakeLN
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.mixture import Mixture
from llmstack.model.norms.taper import Phase, TaperedSite

Mode = Literal["eager", "compiled"]
Pass = Literal["forward", "forward_backward"]
MODES: tuple[Mode, ...] = ("eager", "compiled")
PASSES: tuple[Pass, ...] = ("forward", "forward_backward")
PLACES = ("attention", "mlp", "block")
REFERENCE = "rmsnorm"
PHASES: tuple[Phase, ...] = ("norm", "taper", "linear")
_GATES = {"norm": 1.0, "taper": 0.5, "linear": 0.0}
_WARM_UP = 2


class Shape(NamedTuple):
    """Of the residual stream."""

    batch: int
    seq: int
    hidden: int


class Variant(NamedTuple):
    """A method, in one phase of its life if its norms change while the model trains."""

    method: str
    phase: Phase | None = None

    def __str__(self) -> str:
        return self.method if self.phase is None else f"{self.method} ({self.phase})"


@dataclass(frozen=True)
class Operation:
    """What is timed: a call with its inputs, and the gradients that come back to its outputs."""

    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    parameters: list[Tensor]
    gradients: list[Tensor]

    def forward(self) -> Any:
        """The outputs, as without training."""
        with torch.no_grad():
            return self.call(*self.inputs)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """The gradients of all inputs and parameters."""
        outputs = _tensors(self.call(*self.inputs))
        return torch.autograd.grad(outputs, [*_tensors(self.inputs), *self.parameters], self.gradients)

    def least_bytes(self, of: Pass) -> int:
        """Bytes to read and write at least, by the convention above."""
        # A gradient has the size of what it belongs to.
        inputs, outputs, parameters = map(bytes_of, (_tensors(self.inputs), self.gradients, self.parameters))
        forward = inputs + outputs + parameters
        return forward if of == "forward" else forward + outputs + 2 * inputs + 2 * parameters


class BlockNorms:
    """The norms that a method puts into a block, at fixed random inputs.

    Args:
        variant: method with default options, and its phase.
        shape: of the residual stream.
        dtype: of inputs and parameters.
        device: where they lie.
    """

    def __init__(self, variant: Variant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        method = METHODS[variant.method]()
        config = ModelConfig(hidden_size=shape.hidden, num_heads=1, positions="none", num_layers=1)
        self._draw = functools.partial(
            torch.randn, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype
        )
        self._carries = method.residual_scale(config) is None
        self.attention, self.mlp = method.attention_norm(config, 0), method.mlp_norm(config, 0)
        after = (method.after_attention(config, 0), method.after_mlp(config, 0))
        self.after = [norm for norm in after if not isinstance(norm, nn.Identity)]
        for norm in self.sites():
            norm.to(device, dtype)
        self._streams = [self._draw(shape).requires_grad_() for _ in range(2 + len(self.after))]
        if variant.phase is not None:
            for norm in (self.attention, self.mlp):
                enter_phase(norm, variant.phase, self._streams[0].detach())

    def sites(self) -> list[nn.Module]:
        """The norms of the block."""
        return [self.attention, self.mlp, *self.after]

    @property
    def x(self) -> Tensor:
        """What the first site reads, [batch, seq, hidden]."""
        return self._streams[0]

    def operations(self, mode: Mode) -> dict[str, Operation]:
        """By place. The sites are compiled one by one: in a block, attention and MLP stand between them."""
        prepare = functools.partial(torch.compile, fullgraph=True, dynamic=False) if mode == "compiled" else _as_it_is
        attention, mlp = prepare(self.attention.forward), prepare(self.mlp.forward)
        after = [prepare(norm.forward) for norm in self.after]

        def block(x: Tensor, middle: Tensor, *updates: Tensor) -> Any:
            if self._carries:
                u, carry = attention(x)
                w = mlp(middle, carry)
            else:
                u, w = attention(x), mlp(middle)
            return u, w, *(norm(update) for norm, update in zip(after, updates, strict=True))

        x, middle, *_ = self._streams
        carried = (_leaf(self.attention(x)[1]),) if self._carries else ()
        return {
            "attention": self._operation(attention, (x,), [self.attention]),
            "mlp": self._operation(mlp, (middle, *carried), [self.mlp]),
            "block": self._operation(block, tuple(self._streams), [self.attention, self.mlp, *self.after]),
        }

    def _operation(self, call: Callable[..., Any], inputs: tuple[Any, ...], norms: list[nn.Module]) -> Operation:
        gradients = [self._draw(output.shape).to(output.dtype) for output in _tensors(call(*inputs))]
        return Operation(call, inputs, [weight for norm in norms for weight in norm.parameters()], gradients)


@torch.no_grad()
def enter_phase(site: nn.Module, phase: Phase, x: Tensor) -> None:
    """Bring a site whose norm is removed in training to ``phase``, its constants fitted to ``x``.

    FakeLN switches its sites one after the other: ``taper`` is a switched site while others are not yet.
    """
    if isinstance(site, TaperedSite):
        sums = site.calibration_sums(x)
        site.calibration.update(sums[:2] / sums[2], decay=0.0)
        site.freeze()
        site.set_gate(_GATES[phase])
    elif isinstance(site, FakeLN) and phase != "norm":
        every, _, tokens, _ = site.sums(x)
        for scale in site.paths().values():
            scale.average.update((every / tokens).expand(3), decay=0.0)
            scale.freeze(first_token=False)
        site.is_linear = phase == "linear"


def variants(names: Sequence[str] | None) -> list[Variant]:
    """The methods ``names`` in all their phases; none: all that stand in every layer.

    Raises:
        UserError: an unknown method (the message lists the known), or a mixture of others.
    """
    known = [name for name, method in METHODS.items() if not issubclass(method, Mixture)]
    for name in names or ():
        if name not in known:
            problem = "it is a mixture of other methods" if name in METHODS else "unknown method"
            raise UserError(f"--methods {name}: {problem} (there are: {', '.join(sorted(known))})")
    chosen = known if names is None else list(dict.fromkeys(names))
    return [Variant(name, phase) for name in chosen for phase in _phases(METHODS[name]())]


def _phases(method: NormMethod) -> Sequence[Phase | None]:
    site = method.mlp_norm(ModelConfig(), 0)
    return PHASES if isinstance(site, TaperedSite | FakeLN) else (None,)


def measure(
    chosen: Sequence[Variant],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Every variant at every place, in every mode, in every pass: plain JSON values.

    Args:
        chosen: what to measure.
        shape: of the residual stream.
        dtype: of inputs and parameters.
        device: GPU or CPU.
        repeats: timed rounds of each measurement.
        progress: told what is next.

    Returns:
        ``results`` (a list), ``copy_gb_per_second`` over the whole run, and what was measured on.

    Raises:
        UserError: a number that is too small.
    """
    _check(shape, repeats)
    clock, results = Clock(device), []
    for number, variant in enumerate(chosen, start=1):
        progress(f"{number}/{len(chosen)} {variant}")
        results += list(_measure_variant(variant, shape, dtype, device, repeats, clock))
    return {
        "bench": "norm",
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": shape._asdict(),
        "repeats": repeats,
        "copy_gb_per_second": median(result["copy_gb_per_second"] for result in results),
        "results": results,
    }


def _check(shape: Shape, repeats: int) -> None:
    for name, value in shape._asdict().items():
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if repeats < FEWEST:
        raise UserError(f"--repeats is {repeats}; an interval needs at least {FEWEST}")


def _measure_variant(
    variant: Variant, shape: Shape, dtype: torch.dtype, device: torch.device, repeats: int, clock: Clock
) -> Iterator[dict[str, Any]]:
    norms, reference = (BlockNorms(one, shape, dtype, device) for one in (variant, Variant(REFERENCE)))
    copy = Copy(norms.x)
    # The compiler keeps a list of graphs for each function and searches it at every call: both start with none.
    torch.compiler.reset()
    for mode in MODES:
        own, other = norms.operations(mode), reference.operations(mode)
        for place in PLACES:
            for of in PASSES:
                runs = [getattr(own[place], of), getattr(other[place], of), copy]
                times, reference_times, copy_times = rounds(runs, repeats, clock)
                yield {
                    "method": variant.method,
                    "phase": variant.phase,
                    "mode": mode,
                    "place": place,
                    "pass": of,
                    **_figures(own[place].least_bytes(of), copy.bytes, times, reference_times, copy_times),
                }


def rounds(runs: Sequence[Callable[[], object]], repeats: int, clock: Clock) -> list[list[float]]:
    """Seconds of each of ``runs`` in ``repeats`` rounds; the first two change places from one round to the next."""
    for run in runs:
        for _ in range(_WARM_UP):
            run()
    first, second, *rest = runs
    found: list[list[float]] = [[] for _ in runs]
    for number in range(repeats):
        swapped = number % 2 == 1
        times = clock.seconds([second, first, *rest] if swapped else [first, second, *rest])
        if swapped:
            times[:2] = times[1::-1]
        for series, value in zip(found, times, strict=True):
            series.append(value)
    return found


def _figures(
    least_bytes: int, copied: int, times: list[float], reference: list[float], copies: list[float]
) -> dict[str, Any]:
    ratio = paired_ratio(times, reference)
    return {
        "median_seconds": median(times),
        "bytes": least_bytes,
        "gb_per_second": least_bytes / median(times) / 1e9,
        "copy_gb_per_second": copied / median(copies) / 1e9,
        # By rounds, as the ratio is.
        "share_of_copy": least_bytes / copied / paired_ratio(times, copies).median,
        "ratio_to_rmsnorm": ratio.median,
        "ratio_interval": [ratio.low, ratio.high],
    }


def device_name(device: torch.device) -> str:
    """For the reader of a result."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def as_text(measured: dict[str, Any]) -> str:
    """A table for each mode and place, a row for each method."""
    shape = " x ".join(str(size) for size in measured["shape"].values())
    lines = [
        f"{measured['device']}, torch {measured['torch']}; {shape} (batch x seq x hidden) in {measured['dtype']}",
        f"copy: {measured['copy_gb_per_second']:.1f} GB/s read and written. Median of {measured['repeats']} rounds;",
        "bytes moved at least / time = GB/s, its share of the copy's, and time / RMSNorm's with its 95 % interval",
    ]
    cells = {(r["mode"], r["place"], r["pass"], r["method"], r["phase"]): r for r in measured["results"]}
    rows = list(dict.fromkeys(Variant(r["method"], r["phase"]) for r in measured["results"]))
    width = max(len(str(row)) for row in rows)
    header = f"{'ms':>9} {'GB/s':>7} {'share':>6}  {'/ RMSNorm':<19}"
    for mode in MODES:
        for place in PLACES:
            title = "all norms of a block" if place == "block" else f"the norm at {place}"
            lines += ["", f"{title}, {mode}", f"{'':{width}} {'forward':^44} {'forward + backward':^44}"]
            lines.append(f"{'':{width}} {header} {header}".rstrip())
            for row in rows:
                shown = " ".join(_cell(cells[mode, place, of, row.method, row.phase]) for of in PASSES)
                lines.append(f"{row!s:{width}} {shown}".rstrip())
    return "\n".join(lines)


def _cell(result: dict[str, Any]) -> str:
    low, high = result["ratio_interval"]
    ratio = f"{result['ratio_to_rmsnorm']:.2f} [{low:.2f}, {high:.2f}]"
    share = f"{100 * result['share_of_copy']:.0f} %"
    return f"{1e3 * result['median_seconds']:9.3f} {result['gb_per_second']:7.1f} {share:>6}  {ratio:<19}"


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, in order."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _leaf(value: Any) -> Any:
    """The same values as inputs of a graph of their own."""
    if isinstance(value, tuple):
        return tuple(_leaf(part) for part in value)
    return value.detach().requires_grad_() if isinstance(value, Tensor) else value


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
