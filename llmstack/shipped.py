"""Where preset YAML files and batch script templates lie: inside an installed package, or beside it in a checkout."""

from pathlib import Path

from llmstack.errors import UserError

_PACKAGE = Path(__file__).resolve().parent


def configs_folder() -> Path:
    """Folder of the shipped configurations (``model/``, ``norm/``, ``data/``, ``trainer/``)."""
    return _shipped("configs")


def slurm_folder() -> Path:
    """Folder of the templates of batch scripts."""
    return _shipped("slurm")


def _shipped(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def find_config(name: str) -> Path:
    """The file meant by ``name``: beside the user first, then among the shipped ones.

    ``norm/bhyt.yaml`` and ``configs/norm/bhyt.yaml`` mean the same shipped file from any folder.

    Raises:
        UserError: no such file; the message lists the shipped ones of that kind.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = configs_folder()
    relative = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if not path.is_absolute() and (shipped / relative).is_file():
        return shipped / relative
    if path.is_absolute() or path.exists():
        raise UserError(f"{name} is no configuration file")
    known = sorted(str(found.relative_to(shipped)) for found in (shipped / relative).parent.glob("*.yaml"))
    hint = ", ".join(known) if known else "see the folders model/, norm/, data/, trainer/"
    raise UserError(f"no configuration file {name} here or among the shipped ones ({hint})")
