"""``llmstack evaluate``: tasks of lm-eval on a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack.cli.parsing import output_file, positive
from llmstack.errors import Stopped, UserError

if TYPE_CHECKING:
    from llmstack.checkpoint import RunFolder, Source
    from llmstack.evaluation.harness import HarnessModel
    from llmstack.evaluation.settings import Settings
    from llmstack.evaluation.tasks import OfflineTasks
    from llmstack.ranks import Ranks
_LOOK_SECONDS = 10.0
"""Between two looks at a run that is watched."""


def add_parser(subparsers: Any) -> None:
    """Register ``evaluate``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "evaluate",
        help="tasks of lm-eval, natively",
        description="Ask a checkpoint the questions of lm-eval's tasks. Nothing is downloaded: data sets lie under "
        "--data-root in the hub's layout. Under torchrun or srun all ranks share the work. The results of a run's "
        "checkpoint go into its folder too, where `llmstack report` finds them.",
    )
    parser.add_argument("ckpt", metavar="CKPT", help="run folder, checkpoint, or Hugging Face Llama folder")
    parser.add_argument(
        "--tasks",
        default="paper",
        metavar="A,B",
        help="names or groups of lm-eval, task files, `paper` (arc_challenge, arc_easy, piqa, hellaswag, openbookqa, "
        "winogrande, mmlu, boolq), or python_reference, which needs no data set (default: %(default)s)",
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question (default: as each task says)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents of each task")
    parser.add_argument(
        "--fewshot-seeds", default="1234", metavar="N,N", help="draws of the examples (default: %(default)s)"
    )
    parser.add_argument(
        "--data-root",
        metavar="DIR",
        help="holds <owner>/<name>/ of each data set (default: $LLMSTACK_DATA, or ~/.cache/llmstack/hub)",
    )
    parser.add_argument("--include", action="append", default=[], metavar="DIR", help="task files of your own")
    parser.add_argument("--output", type=output_file, metavar="F.json", help="write the results to this file")
    parser.add_argument("--log-samples", metavar="DIR", help="write question, answer and scores of every document here")
    parser.add_argument(
        "--watch", action="store_true", help="evaluate every new checkpoint of the run CKPT, until it is finished"
    )
    parser.add_argument("--show", action="store_true", help="print the first document of each task, with ids")
    _add_model(parser)
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer file or folder (default: the checkpoint's)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights (default: %(default)s)")
    parser.add_argument("--weights", choices=("int8", "int4"), help="store the matrices as whole numbers")
    parser.add_argument("--no-fold", action="store_true", help="keep the norms explicit (default: folded)")
    parser.add_argument(
        "--max-length",
        type=positive,
        metavar="L",
        help="most tokens that the model sees (default: its positions)",
    )
    parser.add_argument(
        "--batch-size",
        default="auto",
        metavar="N",
        help="rows of a batch, or auto (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile the model (default: on a GPU yes, on a CPU no)",
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="keep answers here, by the checkpoint's content, and use those that are there"
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask through the tokenizer's chat template (default: plain text)"
    )
    parser.add_argument("--chat-template", metavar="T", help="llama3, chatml, or a Jinja file; with --chat")
    parser.add_argument("--system-instruction", metavar="TEXT", help="before everything else")
    parser.add_argument(
        "--fewshot-as-multiturn",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --chat: examples are turns of the conversation (default: yes)",
    )


def run(args: argparse.Namespace) -> int:
    """Print and write the results; raises UserError for whatever is wrong with arguments, data or checkpoint."""
    from llmstack.cli.ranks import join

    settings = _settings(args)
    ranks = join()
    from llmstack.evaluation.tasks import OfflineTasks, by_itself
    from llmstack.hub import hub_root

    by_itself(progress=ranks.is_first and sys.stderr.isatty())
    manager = OfflineTasks(Path(args.data_root).expanduser() if args.data_root else hub_root(), args.include)
    manager.check(settings.tasks)
    if args.watch:
        _watch(args, settings, manager, ranks)
    else:
        _evaluate(args, args.ckpt, settings, manager, ranks)
    return 0


def _watch(args: argparse.Namespace, settings: Settings, manager: OfflineTasks, ranks: Ranks) -> None:
    """Evaluate the newest checkpoint of a run whenever it has a new one; what lies between two looks is left out."""
    from llmstack.checkpoint import RunFolder
    from llmstack.checkpoint.run_folder import CONFIG_FILE

    if not (Path(args.ckpt) / CONFIG_FILE).is_file():
        raise UserError(f"--watch: {args.ckpt} is no run folder")
    done: set[str] = set()
    while True:
        run = RunFolder(args.ckpt)
        # In this order: a run that is finished now has no checkpoint later.
        finished, newest = ranks.from_first((run.status == "finished", _newest(run)))
        if newest is not None and newest not in done:
            done.add(newest)
            try:
                _evaluate(args, newest, settings, manager, ranks)
            except (UserError, Stopped) as error:
                # The run keeps a few checkpoints only: this one may have gone meanwhile.
                if Path(newest).exists():
                    raise
                if ranks.is_first:
                    print(f"llmstack: {error}; it is no longer kept", file=sys.stderr)
        elif finished:
            return
        else:
            time.sleep(_LOOK_SECONDS)


def _newest(run: RunFolder) -> str | None:
    found = run.newest_checkpoint()
    return str(found.path) if found is not None else None


def _evaluate(args: argparse.Namespace, ckpt: str, settings: Settings, manager: OfflineTasks, ranks: Ranks) -> None:
    """Evaluate one checkpoint, print and write what came of it."""
    from llmstack.checkpoint import resolve
    from llmstack.cli.ranks import together
    from llmstack.evaluation.results import (
        as_text,
        described,
        evaluate,
        first_requests,
        record,
        samples_text,
        write,
        write_text,
    )

    loaded: list[tuple[Source, HarnessModel]] = []

    def load() -> None:
        source = resolve(ckpt)
        loaded.append((source, _model(args, source, ranks)))

    # One rank that cannot read it ends all.
    together(ranks, load)
    ((source, model),) = loaded
    if ranks.is_first:
        print(_introduction(model, source), file=sys.stderr, flush=True)
    evaluated = evaluate(model, manager, settings)
    if not ranks.is_first:
        return
    if args.show:
        print(first_requests(evaluated, model))
    print(as_text(evaluated, settings))
    for name, one in evaluated.tasks.items():
        if one["notes"]:
            print(f"{name}: {'; '.join(one['notes'])}", file=sys.stderr)
    written = record(evaluated, model, described(source, ckpt), settings, ["llmstack", *sys.argv[1:]])
    for path in _outputs(args, source, written):
        write(path, written)
        print(path, file=sys.stderr)
    if args.log_samples:
        for name, samples in evaluated.samples.items():
            write_text(Path(args.log_samples) / f"{name}.jsonl", samples_text(samples))


def _settings(args: argparse.Namespace) -> Settings:
    from llmstack.evaluation.settings import Settings, task_names

    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise UserError(f"--num-fewshot is {args.num_fewshot}; it must be 0 or above")
    if args.chat_template and not args.chat:
        raise UserError("--chat-template says how a chat is written: it needs --chat")
    try:
        seeds = [int(part) for part in args.fewshot_seeds.split(",")]
    except ValueError:
        raise UserError(f"--fewshot-seeds {args.fewshot_seeds}: not whole numbers with commas between them") from None
    return Settings(
        tasks=task_names(args.tasks),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        fewshot_seeds=seeds,
        chat=args.chat,
        system_instruction=args.system_instruction,
        fewshot_as_multiturn=args.fewshot_as_multiturn,
    )


def _model(args: argparse.Namespace, source: Source, ranks: Ranks) -> HarnessModel:
    from llmstack.evaluation.harness import HarnessModel

    return HarnessModel(
        source,
        dtype=args.dtype,
        weights=args.weights,
        fold=not args.no_fold,
        max_length=args.max_length,
        batch_size=args.batch_size,
        tokenizer=args.tokenizer,
        compile=args.compile,
        responses=args.cache,
        chat_template=args.chat_template,
        ranks=ranks,
    )


def _introduction(model: HarnessModel, source: Source) -> str:
    bos = f"BOS ({model.tokenizer.bos_id}) before each text" if model.policy.bos else "no BOS"
    return f"{source.path}: {bos}; window {model.max_length}"


def _outputs(args: argparse.Namespace, source: Source, written: dict[str, Any]) -> list[Path]:
    """The file asked for, and one in the run that the checkpoint belongs to."""
    from llmstack.evaluation.results import FOLDER, file_name

    paths = [args.output] if args.output is not None else []
    if source.checkpoint is not None and (run := _run_of(source.path)) is not None:
        paths.append(run / FOLDER / file_name(written))
    return paths


def _run_of(checkpoint: Path) -> Path | None:
    from llmstack.checkpoint.run_folder import CONFIG_FILE

    run = checkpoint.absolute().parent.parent
    return run if (run / CONFIG_FILE).is_file() else None
