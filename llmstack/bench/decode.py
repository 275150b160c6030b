"""Decoding: how fast, beside the rate at which the memory can be read, beside other forms, norms and libraries.

To find one more token for every row, all matrices have to be read, and the keys and values of all tokens before it.
Their bytes, over the time of a token, are a rate that cannot exceed the memory's. Contestants are timed in rounds, each
once in every round, so that what disturbs the machine disturbs them alike, and the first is what the ratios refer to.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

import torch

from llmstack.bench.bandwidth import Clock, Read, bytes_of
from llmstack.bench.norm import device_name, enter_phase
from llmstack.bench.paired import median_interval, paired_ratio
from llmstack.checkpoint import config_to_huggingface, to_huggingface_names
from llmstack.errors import UserError
from llmstack.inference import Generator, Request
from llmstack.inference.linear import Weights
from llmstack.inference.runner import CachedRunner
from llmstack.model import Llama, ModelConfig, cache_bytes
from llmstack.model.norms.fake_ln import FakeLN
from llmstack.model.norms.fold import fold
from llmstack.model.norms.taper import TaperedSite

Form = Literal["explicit", "folded", "deferred"]
Mode = Literal["compiled", "eager", "uncached"]

PEERS = {
    "transformers": ("decode_transformers.py", ("dynamic", "static", "compiled")),
    "litgpt": ("decode_litgpt.py", ("static", "compiled")),
}
"""Library -> program that measures it, and the ways in which it decodes."""


class Work(NamedTuple):
    """What every contestant has to do in a round."""

    batch: int
    context: int
    """Positions of the cache."""
    prompt: int
    """Tokens of each prompt."""
    new: int
    """Tokens to find for each."""

    @property
    def filled(self) -> float:
        """Positions that hold something, on average over the decoded tokens."""
        return self.prompt + self.new / 2

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids, the same each time."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (self.batch, self.prompt), generator=generator).tolist()


class Contestant(Protocol):
    """Decodes."""

    name: str
    ids: list[int]
    """What it found for the first prompt."""
    bytes_per_step: float
    """That have to be read for one token of each row."""
    memory: int
    """Bytes that it takes."""
    start_seconds: float
    """Until its first answer was there: loading or folding, compiling, answering."""

    def run(self) -> list[float]:
        """Answer; seconds since the beginning at which each token of the first prompt was there."""


@dataclass(frozen=True)
class Variant:
    """One way in which our own model decodes."""

    norm: str
    form: Form = "folded"
    mode: Mode = "compiled"
    weights: Weights | None = None

    @property
    def name(self) -> str:
        """For the reader of a result."""
        parts = [self.norm, self.form]
        parts += [self.mode] if self.mode != "compiled" else []
        return " ".join([*parts, *([self.weights] if self.weights else [])])


class Ours:
    """A generator of ours at work.

    Args:
        variant: how.
        model: with that norm.
        work: what to do.
    """

    def __init__(self, variant: Variant, model: Llama, work: Work) -> None:
        self.name = variant.name
        before, began = _memory(model), time.perf_counter()
        if variant.form == "deferred":
            model = fold(model, defer_scale=True)
        self._generator = Generator(
            model,
            work.context,
            batch_size=work.batch,
            compile=variant.mode == "compiled",
            fold=variant.form != "explicit",
            weights=variant.weights,
            use_cache=variant.mode != "uncached",
        )
        self._requests = [Request(prompt, work.new) for prompt in work.prompts(self._generator.vocab_size)]
        self._generator.warm_up()
        self.ids: list[int] = []
        self.run()
        self.start_seconds = time.perf_counter() - began
        self.memory = _memory(model) - before
        self.bytes_per_step = bytes_per_step(self._generator, work)

    def run(self) -> list[float]:
        """See :class:`Contestant`."""
        times, ids, began = [], [], time.perf_counter()
        for token in self._generator.run(self._requests):
            if token.request == 0:
                times.append(time.perf_counter() - began)
                ids.append(token.id)
        self.ids = ids
        return times


class PeerMode(NamedTuple):
    """One way in which another library decodes."""

    library: str
    """One of :data:`PEERS`."""
    mode: str
    """One of its ways."""
    python: Path
    """An interpreter that has it."""

    @property
    def name(self) -> str:
        """For the reader of a result."""
        return f"{self.library} {self.mode}"


class Peer:
    """Another library at work, in a process of its own.

    Args:
        peer: which.
        folder: the model in Hugging Face's layout.
        model: the same.
        work: what to do.
    """

    def __init__(self, peer: PeerMode, folder: Path, model: Llama, work: Work) -> None:
        self.name = peer.name
        program = Path(__file__).with_name("peers") / PEERS[peer.library][0]
        weight = model.embed_tokens.weight
        spec = {
            "folder": str(folder),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "mode": peer.mode,
            "threads": torch.get_num_threads() if weight.device.type == "cpu" else 0,
            "prompts": work.prompts(weight.shape[0]),
            "new": work.new,
            "max_length": work.context,
        }
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [str(peer.python), str(program), json.dumps(spec)],
            env=environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            about = self._answer()
        except BaseException:
            self.close()
            raise
        self.ids, self.memory, self.start_seconds = about["ids"], about["memory"], about["start_seconds"]
        size = weight.element_size()
        matrices = sum(p.numel() for p in model.parameters()) * size
        self.bytes_per_step = matrices + _filled_cache_bytes(model.config, work, size)

    def run(self) -> list[float]:
        """See :class:`Contestant`."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            told = self._errors.read().strip().splitlines() or ["no message"]
            raise UserError(f"bench decode: {self.name} failed: {told[-1]}")
        return json.loads(line)


def bytes_per_step(generator: Generator, work: Work) -> float:
    """What has to be read for one more token of every row: all matrices but the embedding, and the filled cache."""
    runner = generator.runner
    if not isinstance(runner, CachedRunner):
        return math.nan
    model = runner.model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if model.lm_head.weight is not model.embed_tokens.weight:
        tensors.pop(id(model.embed_tokens.weight))
    value = runner.cache.layer(0).keys.data.element_size()
    return bytes_of(tensors.values()) + _filled_cache_bytes(model.config, work, value)


def _filled_cache_bytes(config: ModelConfig, work: Work, value_bytes: int) -> float:
    return cache_bytes(config, work.batch, 1, value_bytes) * work.filled


def _memory(model: Llama) -> int:
    """Bytes that this process holds on the device of ``model``."""
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
def model_with_norm(base: Llama, norm: str) -> Llama:
    """The model of ``base``'s shape with another norm method; what both have is the same memory.

    A norm that training removes is gone, its constants fitted to random activations.
    """
    if norm == base.config.norm_method.name:
        return base
    config = replace(base.config, norm={"method": norm})
    model = Llama(config)
    weight = base.embed_tokens.weight
    sites = [module for module in model.modules() if isinstance(module, TaperedSite | FakeLN)]
    for site in sites:
        enter_phase(site, "linear", torch.randn(1, 64, config.hidden_size))
    model.to(weight.device, weight.dtype).eval()
    known = dict(base.named_parameters())
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 2 and name in known:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, known[name])
    model.tie()
    return model


def measure(
    base: Llama,
    variants: Sequence[Variant],
    peers: Sequence[PeerMode],
    works: Sequence[Work],
    rounds: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """All contestants at all works: plain JSON values.

    Args:
        base: the model; peers need its architecture to be stock.
        variants: ours.
        peers: other libraries.
        works: the cells of a sweep.
        rounds: timed answers of each.
        progress: told what is next.

    Raises:
        UserError: a contestant cannot do it.
    """
    device = base.embed_tokens.weight.device
    read, clock = Read(device), Clock(device)
    results: list[dict[str, Any]] = []
    for work in works:
        with ExitStack() as stack:
            contestants = list(_contestants(stack, base, variants, peers, work, progress))
            results += _measure_work(contestants, work, rounds, read, clock, progress)
    return {
        "bench": "decode",
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(base.embed_tokens.weight.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "rounds": rounds,
        "read_gb_per_second": median(result["read_gb_per_second"] for result in results),
        "results": results,
    }


def _contestants(
    stack: ExitStack,
    base: Llama,
    variants: Sequence[Variant],
    peers: Sequence[PeerMode],
    work: Work,
    progress: Callable[[str], None],
) -> Iterator[Contestant]:
    for variant in variants:
        progress(f"starting {variant.name} (batch {work.batch}, context {work.context})")
        yield Ours(variant, model_with_norm(base, variant.norm), work)
    if not peers:
        return
    with huggingface_folder(base) as folder:
        for peer in peers:
            if peer.library == "litgpt" and work.batch > 1:
                progress("litgpt decodes one row at a time: left out")
                continue
            progress(f"starting {peer.name} (batch {work.batch}, context {work.context})")
            started = Peer(peer, folder, base, work)
            stack.callback(started.close)
            yield started


@contextmanager
def huggingface_folder(model: Llama) -> Iterator[Path]:
    """``model`` as other libraries read it, for as long as the context lasts."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="llmstack-bench-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config_to_huggingface(model.config)))
        weights = to_huggingface_names(model.state_dict(), model.config)
        save_file(
            {key: tensor.contiguous() for key, tensor in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        yield folder


def _measure_work(
    contestants: list[Contestant],
    work: Work,
    rounds: int,
    read: Read,
    clock: Clock,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    times: dict[str, list[list[float]]] = {one.name: [] for one in contestants}
    reads = []
    clock.seconds([read])
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        # Who comes after whom changes from round to round.
        for one in contestants if number % 2 == 0 else reversed(contestants):
            times[one.name].append(one.run())
        reads += clock.seconds([read])
    rate = read.bytes / median(reads)
    reference = contestants[0]
    steps = {name: [_step_seconds(answer) for answer in answers] for name, answers in times.items()}
    return [
        {
            "name": one.name,
            **work._asdict(),
            **_figures(one, work, times[one.name], steps[one.name], rate),
            "ratio_to_first": list(paired_ratio(steps[reference.name], steps[one.name])),
            "first_ids_equal": _equal_ids(one.ids, reference.ids),
        }
        for one in contestants
    ]


def _step_seconds(answer: list[float]) -> float:
    """Time of one decoding step, from the first token to the last."""
    return (answer[-1] - answer[0]) / (len(answer) - 1)


def _figures(
    one: Contestant, work: Work, answers: list[list[float]], steps: list[float], rate: float
) -> dict[str, Any]:
    gaps = sorted(later - earlier for answer in answers for earlier, later in pairwise(answer))
    first = median(answer[0] for answer in answers)
    step = median_interval(steps)
    bytes_per_second = one.bytes_per_step / step.median
    return {
        "first_token_seconds": first,
        "prefill_tokens_per_second": work.batch * work.prompt / first,
        "decode_tokens_per_second": work.batch / step.median,
        "decode_interval": [work.batch / step.high, work.batch / step.low],
        "token_p50_seconds": gaps[len(gaps) // 2],
        "token_p95_seconds": gaps[int(0.95 * (len(gaps) - 1))],
        "bytes_per_step": _finite(one.bytes_per_step),
        "gb_per_second": _finite(bytes_per_second / 1e9),
        "read_gb_per_second": rate / 1e9,
        "share_of_read": _finite(bytes_per_second / rate),
        "memory_bytes": one.memory,
        "start_seconds": one.start_seconds,
    }


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _equal_ids(ids: list[int], reference: list[int]) -> int:
    """How many ids from the first on are those of the reference."""
    pairs = enumerate(zip(ids, reference, strict=False))
    return next((place for place, (own, other) in pairs if own != other), min(len(ids), len(reference)))


def as_text(measured: dict[str, Any]) -> str:
    """A table for each batch and context, a row for each contestant."""
    lines = [
        f"{measured['device']}, torch {measured['torch']}; {measured['parameters']:,} parameters in "
        f"{measured['dtype']}; memory read at {measured['read_gb_per_second']:.1f} GB/s.",
        f"Median of {measured['rounds']} rounds; x: speed as a multiple of the first, with its 95 % interval; GB/s: "
        "matrices and filled cache read for",
        "each token; same: tokens from the first on that are those of the first contestant.",
    ]
    cells = list(dict.fromkeys(tuple(r[key] for key in Work._fields) for r in measured["results"]))
    width = max(len(result["name"]) for result in measured["results"])
    for cell in cells:
        work = Work(*cell)
        lines += ["", f"batch {work.batch}, cache of {work.context}, prompt {work.prompt}, {work.new} new tokens"]
        lines.append(
            f"{'':{width}} {'tokens/s':>9} {'x':^18} {'p50 ms':>7} {'p95 ms':>7} {'first ms':>9} {'prefill/s':>9} "
            f"{'GB/s':>6} {'share':>6} {'GB':>6} {'start s':>8} {'same':>5}"
        )
        rows = [result for result in measured["results"] if tuple(result[key] for key in Work._fields) == cell]
        lines += [_row(result, width) for result in rows]
    return "\n".join(lines)


def _row(result: dict[str, Any], width: int) -> str:
    ratio, low, high = result["ratio_to_first"]
    rate, share = result["gb_per_second"], result["share_of_read"]
    return (
        f"{result['name']:{width}} {result['decode_tokens_per_second']:9.1f} "
        f"{f'{ratio:.3f} [{low:.3f}, {high:.3f}]':18} "
        f"{1e3 * result['token_p50_seconds']:7.1f} {1e3 * result['token_p95_seconds']:7.1f} "
        f"{1e3 * result['first_token_seconds']:9.0f} {result['prefill_tokens_per_second']:9.0f} "
        f"{'' if rate is None else f'{rate:.1f}':>6} {'' if share is None else f'{100 * share:.0f} %':>6} "
        f"{result['memory_bytes'] / 1e9:6.2f} {result['start_seconds']:8.1f} {result['first_ids_equal']:5}"
    ).rstrip()


def draw(measured: dict[str, Any], path: Path) -> None:
    """Tokens/s over batch and over context, a line for each contestant, and what the memory allows the first."""
    from matplotlib.figure import Figure

    results = measured["results"]
    swept = [key for key in ("batch", "context") if len({result[key] for result in results}) > 1] or ["batch"]
    figure = Figure(figsize=(6.4 * len(swept), 4.4), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(swept), squeeze=False)[0], swept, strict=True):
        others = {other: results[0][other] for other in ("batch", "context") if other != key}
        shown = [result for result in results if all(result[name] == value for name, value in others.items())]
        for name in dict.fromkeys(result["name"] for result in shown):
            line = [(result[key], result["decode_tokens_per_second"]) for result in shown if result["name"] == name]
            axes.plot(*zip(*line, strict=True), marker="o", label=name)
        limit = [
            (result[key], result["batch"] * result["read_gb_per_second"] * 1e9 / result["bytes_per_step"])
            for result in shown
            if result["name"] == results[0]["name"] and result["bytes_per_step"]
        ]
        if limit:
            axes.plot(*zip(*limit, strict=True), "k--", label=f"memory bandwidth ({results[0]['name']})")
        axes.set(xlabel=key, ylabel="tokens/s", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
