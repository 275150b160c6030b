"""What is special about a cluster: one YAML file, so that no run has to know it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmstack.errors import UserError
from llmstack.yaml_files import read_yaml

SITE = "LLMSTACK_SITE"
"""Variable with the site file's path; else ``~/.config/llmstack/site.yaml`` is used, if there is one."""


@dataclass(frozen=True)
class Site:
    """Each field is optional."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    cpus_per_node: int | None = None
    """Cores of a node, shared by its ranks."""
    memory_per_node: str | None = None
    """Asked for instead of what the run is computed to need, as 900G."""
    gpu: str | None = None
    """Name of the GPUs as in ``llmstack plan``, for the check that a run fits."""
    modules: list[str] = field(default_factory=list)
    """Environment modules to load."""
    setup: str = ""
    """Lines of bash that every job runs first."""
    srun: list[str] = field(default_factory=list)
    """Further options of srun, as those of a container: [--container-image=/images/torch.sqsh]."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch."""

    @classmethod
    def read(cls, path: str | None = None) -> Site:
        """The site file: the one given, that of ``LLMSTACK_SITE``, or the user's own.

        Raises:
            UserError: it is not there, or no mapping of the fields above.
        """
        given = path or os.environ.get(SITE)
        file = Path(given or "~/.config/llmstack/site.yaml").expanduser()
        if given is None and not file.is_file():
            return cls()
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise UserError(f"site file {file} holds no mapping")
        return cls(**{str(name): _checked(file, str(name), value) for name, value in content.items()})

    def directives(self) -> Iterator[str]:
        """Options of sbatch."""
        for name in ("account", "partition", "qos", "constraint", "exclude", "reservation"):
            if (value := getattr(self, name)) is not None:
                yield f"--{name}={value}"
        yield from self.sbatch

    def preparation(self) -> Iterator[str]:
        """Lines of the script that come before all work."""
        if self.modules:
            yield f"module load {shlex.join(self.modules)}"
        if self.setup:
            yield self.setup.rstrip()


def _checked(file: Path, name: str, value: Any) -> Any:
    known = {one.name for one in fields(Site)}
    if name not in known:
        raise UserError(f"site file {file}: {name} is unknown (there are: {', '.join(sorted(known))})")
    if name in ("modules", "srun", "sbatch"):
        right = isinstance(value, list) and all(isinstance(one, str) for one in value)
    elif name == "cpus_per_node":
        right = isinstance(value, int) and not isinstance(value, bool) and value > 0
    else:
        right = isinstance(value, str)
    if not right or (isinstance(value, str) and name != "setup" and "\n" in value):
        kind = {"cpus_per_node": "a number above 0"}.get(name, "a list" if isinstance(value, list) else "text")
        kind = "a list of texts" if name in ("modules", "srun", "sbatch") else kind
        raise UserError(f"site file {file}: {name} is {value!r}; it must be {kind}")
    return value
