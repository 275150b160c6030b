"""``llmstack inspect``: what a checkpoint is, read without loading its matrices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.checkpoint import Source
    from llmstack.model import ModelConfig

_DTYPES = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2), "fp16": ("float16", 2), "int8": ("int8", 1)}


def add_parser(subparsers: Any) -> None:
    """Register ``inspect``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a checkpoint is",
        description="Architecture, parameters by part, the norm at each site, size of the KV cache, training state.",
    )
    parser.add_argument("ckpt", metavar="CKPT", help="run folder, checkpoint, or Hugging Face Llama folder")
    parser.add_argument("--json", action="store_true", help="print JSON (default: text)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens in the KV cache (default: all positions of the model)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences in it (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), default="bf16", help="type of its values (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description; raises UserError where there is no checkpoint or the cache asked for is impossible."""
    from llmstack.checkpoint import resolve

    description = describe(resolve(args.ckpt), args.context, args.batch, args.dtype)
    print(json.dumps(description, indent=2, ensure_ascii=False) if args.json else _as_text(description))
    return 0


def describe(source: Source, context: int | None = None, batch: int = 1, dtype: str = "bf16") -> dict[str, Any]:
    """Plain JSON values: ``architecture``, ``parameters``, ``norm``, ``kv_cache``, ``training`` and where it lies."""
    from llmstack.accounting import cache_bytes, count_parameters

    config = source.config
    context = config.max_position_embeddings if context is None else context
    if not 1 <= context <= config.max_position_embeddings:
        raise UserError(f"--context is {context}; this model has 1 to {config.max_position_embeddings} positions")
    if batch < 1:
        raise UserError(f"--batch is {batch}; it must be at least 1")
    name, value_bytes = _DTYPES[dtype]
    checkpoint = source.checkpoint
    architecture = {**config.to_dict(), "num_kv_heads": config.kv_heads, "head_dim": config.head_size}
    del architecture["norm"]
    return {
        "path": str(source.path),
        "tokenizer": str(source.tokenizer) if source.tokenizer is not None else None,
        "architecture": architecture,
        "parameters": count_parameters(config).to_dict(),
        "norm": {
            "method": config.norm_method.name,
            "options": asdict(config.norm_method),
            "sites": _norm_sites(config),
            "values": _norm_values(source),
        },
        "kv_cache": {
            "bytes": cache_bytes(config, batch, context, value_bytes),
            "context": context,
            "batch": batch,
            "dtype": name,
        },
        "training": {"step": checkpoint.step, **checkpoint.state} if checkpoint is not None else None,
    }


def _norm_sites(config: ModelConfig) -> dict[str, str]:
    """The class at each place where a norm method puts a module (``layers.*``: in every block)."""
    import torch
    from torch import nn

    from llmstack.model import Llama

    with torch.device("meta"):
        model = Llama(config)
    sites: dict[str, nn.Module] = {"after_embedding": model.after_embedding}
    per_block = ("attention_norm", "after_attention", "mlp_norm", "after_mlp")
    for site in per_block:
        classes = {type(getattr(block, site)).__name__ for block in model.blocks}
        if len(classes) == 1:
            sites[f"layers.*.{site}"] = getattr(model.blocks[0], site)
        else:
            sites |= {f"layers.{index}.{site}": getattr(block, site) for index, block in enumerate(model.blocks)}
    sites["norm"] = model.norm
    return {site: type(module).__name__ for site, module in sites.items() if not isinstance(module, nn.Identity)}


def _norm_values(source: Source) -> dict[str, list[float] | float]:
    """The stored scalars of the norms (λ, c_attn, …): of blocks as a list over the blocks, else one number."""
    values: dict[str, list[float] | float] = {}
    for name, shape in source.weights.shapes().items():
        if shape != (1,) or ".bias" in name or ".weight" in name:
            continue
        value = source.weights[name].item()
        top, *inner = name.split(".")
        if top != "layers":
            values[name] = value
            continue
        of_blocks = values.setdefault(f"layers.*.{'.'.join(inner[1:])}", [0.0] * source.config.num_layers)
        assert isinstance(of_blocks, list)
        of_blocks[int(inner[0])] = value
    return values


def _as_text(description: dict[str, Any]) -> str:
    cache, norm = description["kv_cache"], description["norm"]
    lines = [description["path"], f"tokenizer: {description['tokenizer'] or 'none'}", "", "architecture"]
    lines += _table(description["architecture"])
    lines += ["", "parameters (a tied matrix counts once, as embedding)"]
    lines += _table({part: f"{count:,}" for part, count in description["parameters"].items()})
    options = ", ".join(f"{name} {value}" for name, value in norm["options"].items())
    lines += ["", f"norm: {norm['method']}{f' ({options})' if options else ''}"]
    lines += _table(norm["sites"])
    lines += _table({name: _numbers(value) for name, value in norm["values"].items()})
    size = f"{cache['bytes']:,} bytes ({cache['bytes'] / 2**20:.1f} MiB)"
    lines += ["", f"KV cache: {size} for {cache['batch']} x {cache['context']} tokens in {cache['dtype']}", ""]
    if description["training"] is None:
        return "\n".join([*lines, "training state: none"])
    return "\n".join([*lines, "training state", *_table(description["training"])])


def _table(values: dict[str, Any]) -> list[str]:
    width = max((len(name) for name in values), default=0)
    return [f"  {name:<{width}}  {_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return "none" if value is None else str(value)


def _numbers(value: list[float] | float) -> str:
    return " ".join(f"{number:.6g}" for number in (value if isinstance(value, list) else [value]))
