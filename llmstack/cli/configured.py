"""Composed YAML configurations: what ``fit`` and ``validate`` share. Imported only when one of them runs."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from llmstack.errors import UserError
from llmstack.shipped import find_config
from llmstack.store import is_remote
from llmstack.training.datamodule import LanguageData
from llmstack.training.launch import cluster_environment
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig
from llmstack.yaml_files import read_yaml

# Field docstrings of the configuration classes are the help of the command line.
jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

TRAINER_DEFAULTS = {
    # The project has its own checkpoints, progress display and metrics; a run is counted in steps.
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "max_epochs": -1,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    # Inference mode would make the compiler treat every tensor of a validation as another kind.
    "inference_mode": False,
    "check_val_every_n_epoch": None,
}


OWNED_BY_THE_RUN = {
    **dict.fromkeys(("max_epochs", "min_epochs", "min_steps", "max_time"), "a run is counted by trainer.max_steps"),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), "validation follows run.validate_every"),
    **dict.fromkeys(("limit_train_batches", "overfit_batches", "fast_dev_run"), "trainer.max_steps makes a run short"),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps"), "a validation is always of all held-out tokens"),
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "barebones"), "a run always saves and reports"),
    "plugins": "how its ranks were started is found out, and precision has its own option",
    "gradient_clip_algorithm": "gradients are clipped by their norm",
    "inference_mode": "it would make the compiler treat every tensor of a validation as another kind",
    "reload_dataloaders_every_n_epochs": "the data is one sequence of steps",
    "use_distributed_sampler": "the order of the data is llmstack's own",
}
"""Trainer options that would contradict the run's own counting, with the reason."""

HOW_IT_RUNS = (
    *(f"trainer.{name}" for name in ("accelerator", "devices", "num_nodes", "strategy", "accumulate_grad_batches")),
    *("data.micro_batch_size", "data.num_workers", "model.compile", "model.activation_checkpointing"),
    *("run.diagnose_every", "run.diagnose_attention", "run.mirror", "run.max_requeues", "run.max_stalled_requeues"),
    *(f"run.evaluate_{name}" for name in ("every", "tasks", "num_fewshot", "limit", "data_root")),
)
"""Options that a run may be continued with other values of: where and how it computes, not what."""

SECTIONS = ("model", "data", "trainer", "run")

PARSER_ERRORS = (
    *(jsonargparse.ArgumentError, MisconfigurationException, ModuleNotFoundError),
    *(RecursionError, ValueError, TypeError),
)
"""What the parser, Lightning and the classes they build raise about a configuration."""

PRECISIONS = ("32-true", "bf16-mixed")


class ConfiguredCLI(LightningCLI):
    """Model, data, trainer and run from configuration files and dotted overrides."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The run's own options, and one seed for all."""
        parser.add_class_arguments(RunConfig, "run")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")

    def instantiate_trainer(self, **options: Any) -> L.Trainer:
        """A trainer that knows who has started its ranks."""
        return super().instantiate_trainer(plugins=[cluster_environment()], **options)

    def before_instantiate_classes(self) -> None:
        """Refuse trainer options that would be ignored or would break the run."""
        trainer, defaults = self.config["trainer"], self.parser.get_defaults()["trainer"]
        for name, reason in OWNED_BY_THE_RUN.items():
            if trainer[name] != defaults[name]:
                raise UserError(f"trainer.{name} is not for llmstack's runs: {reason}")
        if trainer["precision"] not in (None, *PRECISIONS):
            raise UserError(f"trainer.precision is {trainer['precision']}; it must be {' or '.join(PRECISIONS)}")
        if isinstance(trainer["strategy"], str) and trainer["strategy"] != "auto":
            raise UserError(
                f"trainer.strategy is {trainer['strategy']}; it must be auto, or one of llmstack's own, which "
                "trainer/ddp.yaml, zero1.yaml, zero2.yaml, zero3.yaml and zero3_offload.yaml set"
            )
        accumulate, clip = trainer["accumulate_grad_batches"], trainer["gradient_clip_val"]
        if accumulate < 1:
            raise UserError(f"trainer.accumulate_grad_batches is {accumulate}; it must be at least 1")
        if clip is not None and not 0 < clip < math.inf:
            raise UserError(f"trainer.gradient_clip_val is {clip}; it must be above 0, or null for no clipping")


class DescribingCLI(ConfiguredCLI):
    """The checked configuration alone: nothing of it is built, so neither data nor devices have to be there."""

    def instantiate_classes(self) -> None:
        """Nothing."""


def parse(command: str, arguments: Sequence[str], kind: type[ConfiguredCLI] = ConfiguredCLI) -> tuple[Any, list[str]]:
    """Build everything the configuration describes, without starting it.

    Args:
        command: name shown in the help.
        arguments: what follows the subcommand.
        kind: what reads it.

    Returns:
        The CLI object (``model``, ``datamodule``, ``trainer``, ``config``, ``config_init``) and the names of the
        configuration files.

    Raises:
        UserError: whatever is wrong with the configuration, in one line.
    """
    arguments, names = _resolve_configs(arguments)
    quiet_libraries()
    try:
        with _one_line_errors():
            cli = kind(
                LanguageModel,
                LanguageData,
                args=arguments,
                run=False,
                save_config_callback=None,
                seed_everything_default=0,
                trainer_defaults=TRAINER_DEFAULTS,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_kwargs={
                    "prog": f"llmstack {command}",
                    "description": "Options may stand in YAML files (-c, composed left to right) or here. The norm "
                    "methods' options are listed in configs/norm.",
                    "exit_on_error": False,
                },
            )
    except UserError:
        raise
    except PARSER_ERRORS as error:
        raise UserError(_one_line(error)) from error
    return cli, names


def described(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The complete configuration as plain values, of which nothing is built.

    Raises:
        UserError: as :func:`parse`, where the values themselves tell.
    """
    cli, _ = parse(command, arguments, DescribingCLI)
    return _plain(cli)


def configuration(cli: Any) -> dict[str, Any]:
    """The complete configuration as plain values, without where the run lies: what makes two runs the same."""
    values = _plain(cli)
    for section, option in (("data", "files"), ("data", "tokenizer"), ("model", "init_from")):
        values[section][option] = _absolute(values[section][option])
    values.pop("config", None)
    values["run"].pop("dir", None)
    return values


def _plain(cli: Any) -> dict[str, Any]:
    return yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))


def _absolute(path: str | list[str] | None) -> str | list[str] | None:
    """The saved configuration means the same files from any folder."""
    if isinstance(path, list):
        return [str(Path(one).expanduser().absolute()) for one in path]
    return path if not path or is_remote(path) else str(Path(path).expanduser().absolute())


def _resolve_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace ``-c norm/bhyt.yaml`` by the file it means."""
    resolved, names = [], []
    expecting = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if expecting:
            resolved.append(_checked(find_config(argument)))
            names.append(Path(argument).stem)
            expecting = False
        elif option in ("-c", "--config") and not equals:
            resolved.append("--config")
            expecting = True
        elif option == "--config":
            resolved.append(f"--config={_checked(find_config(value))}")
            names.append(Path(value).stem)
        else:
            resolved.append(argument)
    if expecting:
        raise UserError("--config needs a file")
    return resolved, names


def _checked(path: Path) -> str:
    """A YAML file whose sections are mappings: a null one would silently drop what earlier files said."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration: it holds {'nothing' if content is None else 'no mapping'}")
    unknown = sorted(str(name) for name in content if name not in (*SECTIONS, "seed_everything"))
    if unknown:
        raise UserError(
            f"{path}: unknown section {', '.join(unknown)} (there are: {', '.join(SECTIONS)}, seed_everything)"
        )
    for section in SECTIONS:
        if section in content and not isinstance(content[section], dict):
            raise UserError(f"{path}: the section {section} is {content[section]!r}; it must be a mapping")
    return str(path)


def quiet_libraries() -> None:
    """Keep hints that are not about the user's run off the screen."""
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed", "fabric.utilities.distributed"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
    for name in ("accelerators.cuda", "strategies.deepspeed"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.WARNING)
    for pattern in (
        r".*does not have many workers.*",
        r".*smaller than the logging interval.*",
        r".*was configured so validation will run.*",
        r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
        r".*GPU available but not used.*",
        r".*DeepSpeed handles gradient clipping internally.*",
        r".*all_gather_into_tensor.*is deprecated.*",
        r".*reduce_scatter_tensor.*is deprecated.*",
        r".*args parameter is intended to run from within Python.*",
        r".*`srun` command is available on your system but is not used.*",
    ):
        warnings.filterwarnings("ignore", pattern)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """The parser exits where it could raise: turn its exit with a message into a :class:`UserError`."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            yield
    except SystemExit as stop:
        if stop.code:
            raise UserError(_one_line(messages.getvalue())) from stop
        raise


def _one_line(error: Any) -> str:
    """The message of a parser without its usage text, list of causes and line breaks."""
    text = str(error)
    union = re.search(
        r'key "([^"]+)":\s*Does not validate.*?Subtypes: \[(.*?)\]\s*Errors.*Given value: (.*)', text, re.DOTALL
    )
    if union:
        kinds = re.sub(r"<class '(\w+)'>", r"\1", union[2]).replace("NoneType", "null")
        return f"{union[1]} is {union[3].strip()}; it must be one of: {kinds}"
    text = re.sub(r"^usage:.*?(?=error:|\Z)", "", text, flags=re.DOTALL).removeprefix("error:").strip()
    return re.sub(r"\s*\n\s*", " ", text)
