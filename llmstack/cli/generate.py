"""``llmstack generate``: continue a prompt, streaming the text as it is found."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.errors import UserError

if TYPE_CHECKING:
    from llmstack.checkpoint import Source
    from llmstack.inference import Generator, Sampling
    from llmstack.tokenizer import Tokenizer


def add_parser(subparsers: Any) -> None:
    """Register ``generate``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt. The new text goes to standard output as it is found, the rest to standard "
        "error. Generation ends at EOS or after --max-new-tokens.",
    )
    parser.add_argument("ckpt", metavar="CKPT", help="run folder, checkpoint, or Hugging Face Llama folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (default: nothing but BOS)")
    prompt.add_argument("--prompt-file", metavar="F", help="UTF-8 file with the text to continue")
    prompt.add_argument(
        "--prompt-ids", metavar="1,2,3", help="token ids to continue, taken as they are: no BOS is put before them"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="divides the logits; 0: greedy (default: 0, or 1 where --top-k, --top-p or --seed is given)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K largest logits (default: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the most probable ids that hold probability P (default: 1)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="fixes the draws (default: a new one, which is shown)")
    parser.add_argument(
        "--ids", action="store_true", help="print ids, one line with commas, not text (always so without a tokenizer)"
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="a full forward pass per token, to check the cache (default: cache)"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile the decoding step (default: on a GPU yes, on a CPU no)",
    )
    parser.add_argument("--json", metavar="F", help="also write prompt ids, new ids, text and tokens/s to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the continuation; raises UserError for whatever is wrong with the arguments or the checkpoint."""
    import torch

    from llmstack.checkpoint import load_model, resolve
    from llmstack.checkpoint.files import write_atomically
    from llmstack.inference import Generator
    from llmstack.tokenizer import load_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampling = _sampling(args)
    source = resolve(args.ckpt)
    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer is not None else None
    prompt = _prompt_ids(args, source, tokenizer)
    compiled = args.compile if args.compile is not None else device.type == "cuda" and not args.no_cache
    generator = Generator(
        load_model(source, device=device),
        # Compiled code is made for one length of the cache and kept on disk: rounded up, it is found again.
        _positions(len(prompt) + max(args.max_new_tokens, 0), source.config.max_position_embeddings),
        compile=compiled,
        use_cache=not args.no_cache,
        vocab_size=tokenizer.vocab_size if tokenizer is not None else None,
    )
    if compiled:
        print("compiling the decoding step ...", file=sys.stderr)
        generator.warm_up()
    result = _stream(args, generator, prompt, sampling, tokenizer)
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    speed = result["tokens_per_second"]
    print(
        f"{len(prompt)} prompt tokens in {result['prefill_seconds']:.2f} s; {len(result['ids'])} new ones"
        f"{'' if speed is None else f' at {speed:.1f} tokens/s'} on {device.type}{', compiled' if compiled else ''} "
        f"({how}; ended by {result['finish']})",
        file=sys.stderr,
    )
    if args.json is not None:
        record = {"prompt_ids": prompt, **result, **asdict(sampling)}
        write_atomically(Path(args.json), json.dumps(record, ensure_ascii=False) + "\n")
    return 0


def _sampling(args: argparse.Namespace) -> Sampling:
    from llmstack.inference import Sampling

    temperature = args.temperature
    if temperature is None:
        temperature = 0.0 if args.top_k is None and args.top_p is None and args.seed is None else 1.0
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    return Sampling(temperature, args.top_k, args.top_p, seed)


def _prompt_ids(args: argparse.Namespace, source: Source, tokenizer: Tokenizer | None) -> list[int]:
    """Ids to continue: a text gets the checkpoint's BOS, given ids stay as they are."""
    from llmstack.tokenizer import BosEosPolicy, load_policy

    if args.prompt_ids is not None:
        try:
            return [int(part) for part in args.prompt_ids.replace(",", " ").split()]
        except ValueError:
            raise UserError(f"--prompt-ids {args.prompt_ids}: not whole numbers with commas between them") from None
    if tokenizer is None or source.tokenizer is None:
        raise UserError(f"{args.ckpt} has no tokenizer: give the prompt as --prompt-ids 1,2,3")
    text = _read_text(args.prompt_file) if args.prompt_file is not None else args.prompt or ""
    policy = load_policy(source.tokenizer) or BosEosPolicy.default(tokenizer)
    ids = BosEosPolicy(bos=policy.bos, eos=False).wrap(tokenizer.encode(text), tokenizer)
    if not ids:
        raise UserError("the prompt is empty and this checkpoint uses no BOS: give --prompt TEXT")
    return ids


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); convert the file") from error


def _positions(needed: int, limit: int) -> int:
    """Cache length: a power of two from 256 on, within the model's positions; ``stream`` refuses what needs more."""
    return min(max(1 << (needed - 1).bit_length(), 256), limit)


def _stream(
    args: argparse.Namespace, generator: Generator, prompt: list[int], sampling: Sampling, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Print the new tokens; returns them with their text, why they ended, and the speed after the first one."""
    from llmstack.tokenizer import StreamDecoder

    eos = tokenizer.eos_id if tokenizer is not None else None
    stop_ids = [] if eos is None else [eos]
    as_ids = args.ids or tokenizer is None
    decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
    ids: list[int] = []
    times = [time.perf_counter()]
    for token in generator.stream(prompt, args.max_new_tokens, sampling, stop_ids):
        times.append(time.perf_counter())
        text = decoder.push(token) if decoder is not None else ""
        print(("," if ids else "") + str(token) if as_ids else text, end="", flush=True)
        ids.append(token)
    print("" if as_ids or decoder is None else decoder.flush())
    return {
        "ids": ids,
        "text": tokenizer.decode(ids) if tokenizer is not None else None,
        "finish": "EOS" if ids[-1] in stop_ids else "length",
        "prefill_seconds": times[1] - times[0],
        "tokens_per_second": (len(ids) - 1) / (times[-1] - times[1]) if len(ids) > 1 else None,
    }
