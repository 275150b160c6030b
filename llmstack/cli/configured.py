"""Composed YAML configurations: what ``fit`` and ``validate`` share. Imported only when one of them runs."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from llmstack.errors import UserError
from llmstack.shipped import find_config
from llmstack.training.datamodule import LanguageData
from llmstack.training.module import LanguageModel
from llmstack.training.rhythm import RunConfig

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


class ConfiguredCLI(LightningCLI):
    """Model, data, trainer and run from configuration files and dotted overrides."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The run's own options, and one seed for all."""
        parser.add_class_arguments(RunConfig, "run")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")


def parse(command: str, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Build everything the configuration describes, without starting it.

    Args:
        command: name shown in the help.
        arguments: what follows the subcommand.

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
            cli = ConfiguredCLI(
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
    except (jsonargparse.ArgumentError, MisconfigurationException, ModuleNotFoundError, ValueError, TypeError) as error:
        raise UserError(_one_line(error)) from error
    return cli, names


def configuration(cli: Any) -> dict[str, Any]:
    """The complete configuration as plain values, without where the run lies: what makes two runs the same."""
    values = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    for section, option in (("data", "files"), ("data", "tokenizer"), ("model", "init_from")):
        values[section][option] = _absolute(values[section][option])
    values.pop("config", None)
    values["run"].pop("dir", None)
    return values


def _absolute(path: str | list[str] | None) -> str | list[str] | None:
    """The saved configuration means the same files from any folder."""
    if isinstance(path, list):
        return [str(Path(one).expanduser().absolute()) for one in path]
    return path and str(Path(path).expanduser().absolute())


def _resolve_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace ``-c norm/bhyt.yaml`` by the file it means."""
    resolved, names = [], []
    expecting = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if expecting:
            resolved.append(str(find_config(argument)))
            names.append(Path(argument).stem)
            expecting = False
        elif option in ("-c", "--config") and not equals:
            resolved.append("--config")
            expecting = True
        elif option == "--config":
            resolved.append(f"--config={find_config(value)}")
            names.append(Path(value).stem)
        else:
            resolved.append(argument)
    if expecting:
        raise UserError("--config needs a file")
    return resolved, names


def quiet_libraries() -> None:
    """Keep hints that are not about the user's run off the screen."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.accelerators.cuda").setLevel(logging.WARNING)
    for pattern in (
        r".*does not have many workers.*",
        r".*smaller than the logging interval.*",
        r".*was configured so validation will run.*",
        r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
        r".*GPU available but not used.*",
        r".*args parameter is intended to run from within Python.*",
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
    text = re.sub(r"^usage:.*?(?=error:|\Z)", "", text, flags=re.DOTALL).removeprefix("error:").strip()
    return re.sub(r"\s*\n\s*", " ", text)
