"""The text of a batch script, from the templates in ``slurm/``."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmstack.cluster.site import Site
from llmstack.errors import UserError
from llmstack.shipped import slurm_folder

SHORTEST_LEAD = 120
"""Seconds. Slurm looks at the clock about twice a minute, and a step has to end before it is saved."""


@dataclass(frozen=True)
class Shape:
    """What a job asks Slurm for. Each number stands here once: sbatch, srun and the run's trainer take it from here."""

    nodes: int
    tasks: int
    """Ranks on each node, one per device."""
    gpus: bool
    """Whether a rank's device is a GPU; else its CPUs."""
    cpus: int
    """CPUs of each rank."""
    memory: str
    """Of each node, as Slurm writes it: 64G; 0 is all of it."""
    time: str
    """Time limit, as Slurm writes it."""
    lead: int = SHORTEST_LEAD
    """Seconds before its end at which the run is told to save."""
    min_nodes: int | None = None
    """With how many nodes, at least, it may go on when others are lost; None: all."""

    def __post_init__(self) -> None:
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.nodes:
            raise UserError(f"--min-nodes is {self.min_nodes}; it must be 1 to {self.nodes}")
        if not re.fullmatch(r"[0-9]{1,9}[KMGT]?", self.memory):
            raise UserError(f"--mem is {self.memory}; it must be as 64G, or 0 for all of a node")
        if self.lead * 2 > seconds(self.time):
            raise UserError(
                f"--time {self.time} leaves no time to train: the run is told to save {self.lead} s before its end "
                "(--signal-seconds)"
            )


def seconds(time: str) -> int:
    """Of a time limit as Slurm writes it: M, M:S, H:M:S, or D-H, D-H:M, D-H:M:S.

    Raises:
        UserError: it is none of them.
    """
    match = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,6})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?", time)
    if match is None:
        raise UserError(f"--time is {time}; it must be as 24:00:00 or 2-12 (days-hours) or 90 (minutes)")
    days, *rest = match.groups()
    numbers = [int(one) for one in rest if one is not None]
    units = [3600, 60, 1] if days is not None or len(numbers) == 3 else [60, 1]
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


@dataclass(frozen=True)
class Place:
    """Where a job works."""

    run: str
    """Folder of the run, as bash reads it: a quoted path, or one with ``$SLURM_ARRAY_TASK_ID``."""
    log: str
    """Where the script's own output goes, as sbatch reads it."""
    folder: Path
    """Relative paths start here."""
    code: Path
    python: str
    pythonpath: str


def fit_script(name: str, shape: Shape, site: Site, place: Place, accumulate: int = 1, array: str | None = None) -> str:
    """A script that trains, and comes back until the run has finished.

    Args:
        name: of the job.
        shape: what it asks for.
        site: the cluster.
        place: where it works.
        accumulate: micro-batches that a step accumulates when no node is lost.
        array: indices of an array job.
    """
    directives = [f"--array={array}"] if array else []
    train = "train\nstatus=$?\n"
    if shape.min_nodes is not None and shape.min_nodes < shape.nodes:
        directives.append("--no-kill")
        train = _filled(
            "fewer_nodes", nodes=str(shape.nodes), min_nodes=str(shape.min_nodes), accumulate=str(accumulate)
        )
    work = _filled(
        "fit",
        nodes=str(shape.nodes),
        tasks=str(shape.tasks),
        cpus=str(shape.cpus),
        srun="".join(f"{shlex.quote(option)} " for option in site.srun),
        train=train.rstrip(),
    )
    return _job(name, shape, site, place, directives, work)


def evaluation_script(name: str, shape: Shape, site: Site, place: Place, sweep: bool, datasets: Sequence[str]) -> str:
    """A script that measures the perplexity of a run (the best of a sweep) over each of ``datasets``, and reports."""
    select = 'RUN=$("$PYTHON" -m llmstack status "$RUN" --best)\n' if sweep else ""
    lines = [
        f'"$PYTHON" -m llmstack perplexity "$RUN" --dataset {shlex.quote(dataset)} '
        f'--output "$RUN/evaluation/perplexity-{slug(Path(dataset).name)}.json"'
        for dataset in datasets
    ]
    work = _filled("evaluate", select=select, evaluations="\n".join(lines))
    return _job(name, shape, site, place, [], work)


def _job(name: str, shape: Shape, site: Site, place: Place, directives: Sequence[str], work: str) -> str:
    gpus = [f"--gpus-per-node={shape.tasks}"] if shape.gpus else []
    return _filled(
        "job",
        name=slug(name),
        nodes=str(shape.nodes),
        tasks=str(shape.tasks),
        cpus=str(shape.cpus),
        memory=shape.memory,
        time=shape.time,
        lead=str(shape.lead),
        log=_quoted(f"--output={place.log}"),
        directives="".join(f"#SBATCH {_quoted(option)}\n" for option in (*gpus, *directives, *site.directives())),
        folder=shlex.quote(str(place.folder)),
        run=place.run,
        code=shlex.quote(str(place.code)),
        python=shlex.quote(place.python),
        pythonpath=f":{shlex.quote(place.pythonpath)}" if place.pythonpath else "",
        threads=str(shape.cpus),
        setup="".join(f"{line}\n" for line in site.preparation()),
        work=work,
    )


def _filled(template: str, **values: str) -> str:
    """A template of ``slurm/`` with each ``@{name}`` replaced."""
    text = (slurm_folder() / f"{template}.sh").read_text(encoding="utf-8")
    return re.sub(r"@\{(\w+)\}", lambda match: values[match[1]], text)


def _quoted(option: str) -> str:
    """An option with a value as sbatch reads it in a script."""
    name, equals, value = option.partition("=")
    return f'{name}{equals}"{value}"' if re.search(r"[\s']", value) else option


def check_script(text: str) -> None:
    """Refuse what is no bash: the site file's own lines may be none.

    Raises:
        UserError: what bash says.
    """
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if checked.returncode:
        raise UserError(f"the script would be no valid bash (see setup in the site file): {checked.stderr.strip()}")


def slug(text: str) -> str:
    """A name without blanks and signs."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "llmstack"
