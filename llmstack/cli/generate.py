"""``llmstack generate``: continue a prompt, streaming the text as it is found."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import positive
from llmstack.errors import UserError

if TYPE_CHECKING:
    import torch

    from llmstack.checkpoint import Source
    from llmstack.inference import Completion, Generator, PromptLookup, Request, Sampling
    from llmstack.model import Llama
    from llmstack.tokenizer import Tokenizer


def add_parser(subparsers: Any) -> None:
    """Register ``generate``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt. The new text goes to standard output as it is found, the rest to standard "
        "error. Generation ends at EOS, a stop id or string, or after --max-new-tokens.",
    )
    parser.add_argument("ckpt", metavar="CKPT", help="run folder, checkpoint, or Hugging Face Llama folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (default: nothing but BOS)")
    prompt.add_argument("--prompt-file", metavar="F", help="UTF-8 file with the text to continue")
    prompt.add_argument(
        "--prompt-ids", metavar="1,2,3", help="token ids to continue, taken as they are: no BOS is put before them"
    )
    prompt.add_argument(
        "--interactive", action="store_true", help="continue each line of standard input; the model stays loaded"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    _add_sampling(parser)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--stop-ids", default="", metavar="1,2", help="end with one of these ids, beside EOS")
    parser.add_argument(
        "--num-samples", type=positive, default=1, metavar="N", help="so many, with seeds from --seed on, as one batch"
    )
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
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="of weights and cache (default: bf16 for --weights, else fp32)"
    )
    parser.add_argument(
        "--weights", choices=("int8", "int4"), help="store the matrices as whole numbers (needs torchao)"
    )
    parser.add_argument("--cache-dtype", choices=("bf16", "fp32", "int8"), help="of keys and values (default: --dtype)")
    parser.add_argument("--no-fold", action="store_true", help="keep the norms explicit (default: folded)")
    parser.add_argument(
        "--draft",
        metavar="CKPT",
        help="a smaller model that proposes tokens to check several at a time; `lookup`: the text so far proposes them",
    )
    parser.add_argument(
        "--draft-tokens", type=positive, default=4, metavar="N", help="proposed at a time (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="F", help="also write prompt ids, new ids, text and tokens/s to this file")
    parser.set_defaults(run=run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="divides the logits; 0: greedy (default: 0, or 1 where --top-k, --top-p, --min-p or --seed is given)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K largest logits (default: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the most probable ids that hold probability P (default: 1)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="fixes the draws (default: a new one, which is shown)")
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="draw among ids at least P times as probable as the first (default: all)",
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="on ids seen before (default: 1, none)"
    )
    parser.add_argument("--logit-bias", default="", metavar="ID:X,ID:X", help="added to the logits of these ids")


def run(args: argparse.Namespace) -> int:
    """Print the continuation; raises UserError for whatever is wrong with the arguments or the checkpoint."""
    import torch

    from llmstack.checkpoint import resolve
    from llmstack.checkpoint.files import write_atomically
    from llmstack.inference import Request
    from llmstack.tokenizer import load_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampling = _sampling(args)
    source = resolve(args.ckpt)
    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer is not None else None
    if args.interactive and (tokenizer is None or args.num_samples > 1 or args.json is not None):
        raise UserError("--interactive: one text at a time, of a checkpoint with a tokenizer, and no --json")
    prompt = [] if args.interactive else _prompt_ids(args, source, tokenizer)
    stop_ids = _ids("--stop-ids", args.stop_ids)
    if tokenizer is not None and tokenizer.eos_id is not None:
        stop_ids.append(tokenizer.eos_id)
    request = Request(prompt, args.max_new_tokens, sampling, stop_ids, args.stop)
    limit = source.config.max_position_embeddings
    length = limit if args.interactive else _positions(len(prompt) + max(args.max_new_tokens, 0), limit)
    generator = _generator(args, source, tokenizer, length, device)
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    how = f"on {device.type}{', compiled' if _compiled(args, device) else ''} ({how}"
    if args.interactive:
        return _converse(args, source, generator, tokenizer, request, how)
    result = _stream(args, generator, request, tokenizer)
    _tell(generator, request, result, how)
    if args.json is not None:
        record = {"prompt_ids": prompt, **result, **asdict(sampling), "logit_bias": args.logit_bias}
        write_atomically(Path(args.json), json.dumps(record, ensure_ascii=False) + "\n")
    return 0


def _compiled(args: argparse.Namespace, device: torch.device) -> bool:
    return args.compile if args.compile is not None else device.type == "cuda" and not args.no_cache


def _generator(
    args: argparse.Namespace, source: Source, tokenizer: Tokenizer | None, length: int, device: torch.device
) -> Generator:
    import torch

    from llmstack.checkpoint import load_model
    from llmstack.inference import Generator

    types = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}
    dtype = types[args.dtype or ("bf16" if args.weights else "fp32")]
    compiled = _compiled(args, device)
    generator = Generator(
        load_model(source, device=device).to(dtype),
        length,
        batch_size=args.num_samples,
        compile=compiled,
        fold=not args.no_fold,
        weights=args.weights,
        cache_dtype=types[args.cache_dtype] if args.cache_dtype else None,
        use_cache=not args.no_cache,
        tokenizer=tokenizer,
        keep_prefixes=args.interactive,
        draft=_draft(args, device, dtype),
        draft_tokens=args.draft_tokens,
    )
    if compiled:
        print("compiling the decoding step ...", file=sys.stderr)
        generator.warm_up()
    return generator


def _draft(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Llama | PromptLookup | None:
    from llmstack.checkpoint import load_model, resolve
    from llmstack.inference import PromptLookup

    if args.draft is None:
        return None
    if args.draft == "lookup":
        return PromptLookup(args.draft_tokens)
    return load_model(resolve(args.draft), device=device).to(dtype)


def _sampling(args: argparse.Namespace) -> Sampling:
    from llmstack.inference import Sampling

    temperature = args.temperature
    if temperature is None:
        drawn = (args.top_k, args.top_p, args.min_p, args.seed)
        temperature = 0.0 if all(value is None for value in drawn) else 1.0
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    return Sampling(
        temperature,
        args.top_k,
        args.top_p,
        seed,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        logit_bias=_bias(args.logit_bias),
    )


def _bias(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise UserError(f"--logit-bias {text}: not ID:X with commas between them, such as 7:-2.5,9:-inf") from None


def _ids(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"{option} {text}: not whole numbers with commas between them") from None


def _prompt_ids(args: argparse.Namespace, source: Source, tokenizer: Tokenizer | None) -> list[int]:
    """Ids to continue: a text gets the checkpoint's BOS, given ids stay as they are."""
    if args.prompt_ids is not None:
        return _ids("--prompt-ids", args.prompt_ids)
    if tokenizer is None:
        raise UserError(f"{args.ckpt} has no tokenizer: give the prompt as --prompt-ids 1,2,3")
    text = _read_text(args.prompt_file) if args.prompt_file is not None else args.prompt or ""
    return _encoded(text, source, tokenizer)


def _encoded(text: str, source: Source, tokenizer: Tokenizer) -> list[int]:
    from llmstack.tokenizer import BosEosPolicy, load_policy

    assert source.tokenizer is not None
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
    args: argparse.Namespace, generator: Generator, request: Request, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Print the new tokens; returns those of each sample with their text and why they ended, and the speed.

    A single sample is printed as it is found, several one after the other when all are there.
    """
    from llmstack.inference import Completion

    as_ids = args.ids or tokenizer is None
    samples = [Completion() for _ in range(args.num_samples)]
    times = [time.perf_counter()]
    for token in generator.run(request.samples(args.num_samples)):
        times.append(time.perf_counter())
        samples[token.request].add(token)
        if args.num_samples == 1:
            shown = ("," if len(samples[0].ids) > 1 else "") + str(token.id) if as_ids else token.text
            print(shown, end="", flush=True)
    if args.num_samples == 1:
        print()
    else:
        for number, sample in enumerate(samples):
            text = ",".join(map(str, sample.ids)) if as_ids else sample.text
            print(f"[{request.sampling.seed + number}] {text}")
    # The prompt is read for all samples together, so all first tokens come at one time.
    found = len(times) - 1 - args.num_samples
    rest = times[-1] - times[args.num_samples]
    first, *others = [_record(sample, tokenizer) for sample in samples]
    return {
        **first,
        "prefill_seconds": times[1] - times[0],
        "tokens_per_second": found / rest if found else None,
        **({"other_samples": others} if others else {}),
    }


def _record(sample: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    at_eos = tokenizer is not None and sample.ids[-1] == tokenizer.eos_id
    return {
        "ids": sample.ids,
        "text": sample.text if tokenizer is not None else None,
        "finish": "EOS" if at_eos else sample.finish,
    }


def _tell(generator: Generator, request: Request, result: dict[str, Any], how: str) -> None:
    """Numbers of what was printed, on standard error."""
    speed, samples = result["tokens_per_second"], [result, *result.get("other_samples", [])]
    counts, accepted = generator.acceptance, ""
    if generator.draft is not None:
        accepted = f"; the model kept {counts.accepted} of {counts.proposed} proposed tokens so far"
    print(
        f"{len(request.prompt_ids)} prompt tokens in {result['prefill_seconds']:.2f} s; "
        f"{sum(len(sample['ids']) for sample in samples)} new ones"
        f"{'' if speed is None else f' at {speed:.1f} tokens/s'} {how}; "
        f"ended by {', '.join(sample['finish'] for sample in samples)}{accepted})",
        file=sys.stderr,
    )


def _converse(
    args: argparse.Namespace,
    source: Source,
    generator: Generator,
    tokenizer: Tokenizer | None,
    request: Request,
    how: str,
) -> int:
    """Continue each line of standard input; what cannot be continued is said, and the next line is waited for."""
    assert tokenizer is not None
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return 0
        try:
            asked = replace(request, prompt_ids=_encoded(line.removesuffix("\n"), source, tokenizer))
            _tell(generator, asked, _stream(args, generator, asked, tokenizer), how)
        except UserError as error:
            print(f"llmstack: {error}", file=sys.stderr)
