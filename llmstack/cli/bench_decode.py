"""``llmstack bench decode``: how fast a model decodes, beside what the memory allows and beside other libraries."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import output_file, positive
from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.bench.decode import PeerMode, Variant, Work
    from llmstack.model import Llama


def add_parser(subparsers: Any) -> None:
    """Register ``decode``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "decode",
        help="decoding: tokens/s, time to the first token, share of the memory's bandwidth",
        description="Decode greedily from random prompts, in rounds, every contestant once in each: tokens/s with its "
        "ratio to the first contestant and its 95 %% interval, time of a token (p50, p95), time to the first, GB/s of "
        "matrices and filled cache beside the measured read bandwidth (GB: 10^9 bytes), memory, time to start. "
        "Contestants are all combinations of --methods, --forms, --modes and --weights, and the libraries --against. "
        "On the GPU if there is one. The last line of output is JSON (seconds, bytes).",
    )
    parser.add_argument("ckpt", nargs="?", metavar="CKPT", help="model (default: random weights of --preset)")
    parser.add_argument("--preset", default="374m", metavar="NAME", help="model size (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--methods", metavar="A,B", help="norm methods (default: the model's); removed norms are gone")
    _listed(parser, "--forms", "folded", "norms: folded, explicit, deferred (division after the matrices)")
    _listed(parser, "--modes", "compiled", "compiled, eager, uncached (a full pass for each token)")
    _listed(parser, "--weights", "asis", "asis, int8, int4")
    _listed(parser, "--batch", "1", "sequences at a time", metavar="N,N")
    _listed(parser, "--context", "256", "positions of the cache", metavar="N,N")
    parser.add_argument("--prompt", type=positive, default=32, metavar="N", help="its tokens (default: %(default)s)")
    parser.add_argument(
        "--new-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="tokens to find, at least 2 (default: %(default)s)",
    )
    parser.add_argument("--against", metavar="A,B", help="transformers, litgpt: the same weights in their hands")
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(os.environ.get("LLMSTACK_PEERS", ".venv-peers")),
        metavar="DIR",
        help="what scripts/peers.sh made: an environment for each library (default: $LLMSTACK_PEERS or .venv-peers)",
    )
    parser.add_argument("--rounds", type=positive, default=6, metavar="N", help="at least 6 (default: %(default)s)")
    parser.add_argument("--output", type=output_file, metavar="F.json", help="also write the JSON to this file")
    parser.add_argument("--plot", type=output_file, metavar="F.png", help="draw tokens/s over batch and context")
    parser.set_defaults(run=run)


def _listed(parser: argparse.ArgumentParser, option: str, default: str, text: str, metavar: str = "A,B") -> None:
    parser.add_argument(option, default=default, metavar=metavar, help=f"{text} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Print tables and JSON; raises UserError for whatever is wrong with the arguments."""
    from llmstack.bench.decode import as_text, draw, measure
    from llmstack.bench.paired import FEWEST
    from llmstack.checkpoint.files import write_atomically

    if args.rounds < FEWEST:
        raise UserError(f"--rounds is {args.rounds}; an interval needs at least {FEWEST}")
    works, peers = _works(args), _peers(args)
    model = _model(args, peers=bool(peers))
    measured = measure(
        model,
        _variants(args, model),
        peers,
        works,
        args.rounds,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(as_text(measured))
    if args.plot is not None:
        draw(measured, args.plot)
    text = json.dumps(measured)
    print(text)
    if args.output is not None:
        write_atomically(args.output, text + "\n")
    return 0


def _chosen(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name}: unknown (there are: {', '.join(known)})")
    return names


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UserError(f"{option} {text}: not whole numbers of at least 1 with commas between them")
    return list(dict.fromkeys(map(int, parts)))


def _works(args: argparse.Namespace) -> list[Work]:
    from llmstack.bench.decode import Work

    if args.new_tokens < 2:
        raise UserError("--new-tokens is 1; the time between two is what is measured")
    works = [
        Work(batch, context, args.prompt, args.new_tokens)
        for batch in _numbers("--batch", args.batch)
        for context in _numbers("--context", args.context)
    ]
    for work in works:
        if work.context < work.prompt + work.new:
            raise UserError(
                f"--context {work.context} is too small for {work.prompt} prompt tokens and {work.new} new ones"
            )
    return works


def _peers(args: argparse.Namespace) -> list[PeerMode]:
    from llmstack.bench.decode import PEERS, PeerMode

    if args.against is None:
        return []
    libraries = _chosen("--against", args.against, tuple(PEERS))
    pythons = {library: args.peers / library / "bin" / "python" for library in libraries}
    for library, python in pythons.items():
        if not python.is_file():
            raise UserError(f"--against {library}: not in {args.peers}; `bash scripts/peers.sh` makes an environment")
    return [PeerMode(library, mode, pythons[library]) for library in libraries for mode in PEERS[library][1]]


def _variants(args: argparse.Namespace, model: Llama) -> list[Variant]:
    from llmstack.bench.decode import Variant
    from llmstack.model.norms import METHODS
    from llmstack.model.norms.mixture import Mixture

    own = model.config.norm_method.name
    known = tuple(name for name, method in METHODS.items() if not issubclass(method, Mixture) or name == own)
    methods = [own] if args.methods is None else _chosen("--methods", args.methods, known)
    forms = _chosen("--forms", args.forms, ("folded", "explicit", "deferred"))
    modes = _chosen("--modes", args.modes, ("compiled", "eager", "uncached"))
    weights = _chosen("--weights", args.weights, ("asis", "int8", "int4"))
    variants: list[Any] = [
        Variant(method, form, mode, None if kind == "asis" else kind)  # type: ignore[arg-type]
        for method in methods
        for form in forms
        for mode in modes
        for kind in weights
    ]
    return variants


def _model(args: argparse.Namespace, peers: bool) -> Llama:
    import torch

    from llmstack.checkpoint import load_model, resolve
    from llmstack.model import Llama, ModelConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    if args.ckpt is not None:
        model = load_model(resolve(args.ckpt), device=device)
    else:
        config = ModelConfig.preset(args.preset)
        if config.vocab_size is None:
            raise UserError(f"--preset {args.preset} has no vocabulary of its own; give a checkpoint, or 374m, 1b, 3b")
        torch.manual_seed(0)
        model = Llama(config)
    if peers and model.config.norm_method.name != "rmsnorm":
        raise UserError("--against compares models that other libraries know: with RMSNorm")
    for context in _numbers("--context", args.context):
        if context > model.config.max_position_embeddings:
            raise UserError(f"--context {context}: the model has {model.config.max_position_embeddings} positions")
    return model.to(device, dtype).eval()
