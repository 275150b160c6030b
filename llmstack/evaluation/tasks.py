"""lm-eval's tasks with their data sets in local folders, and our own task for machines that have none."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from tqdm import tqdm

from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.errors import UserError
from llmstack.hub import BENCHMARKS
from llmstack.store import cache_root

_OWN = Path(__file__).with_name("task_files")
_FORMATS = ("json", "csv", "parquet", "text", "arrow")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


class OfflineTasks(TaskManager):
    """All packaged tasks of lm-eval, ours, and those of ``include``; data sets lie under ``data_root`` as on the hub.

    A split that a task names and the local set lacks is left out; ``notes`` says so by task.

    Args:
        data_root: holds ``<owner>/<name>/``, as `llmstack fetch` makes it.
        include: folders with further task files.
    """

    def __init__(self, data_root: Path, include: Sequence[str | Path] = ()) -> None:
        for folder in include:
            if not Path(folder).is_dir():
                raise UserError(f"--include {folder}: there is no such folder")
        super().__init__(include_path=[_OWN, *include], include_defaults=False)
        self._index: dict[str, Entry] = {**packaged_tasks(), **self.task_index}
        self._all_tasks = sorted(self._index)
        self.notes: dict[str, list[str]] = {}
        self._factory = _LocalFactory(data_root, self.notes)

    def check(self, names: Sequence[str]) -> None:
        """Whether all of ``names`` are tasks, groups of tasks or files.

        Raises:
            UserError: one is not; the message has those of similar names.
        """
        for name in names:
            if name not in self.task_index and not Path(name).is_file():
                like = [known for known in self.all_tasks if name.lower() in known.lower()][:8]
                hint = f"; there are {', '.join(like)}" if like else ""
                raise UserError(f"--tasks {name}: lm-eval has no such task{hint}")


@cache
def packaged_tasks() -> dict[str, Entry]:
    """Names of lm-eval's own tasks, groups and tags, and their files.

    Its 14,000 files take seconds to read at every start: what was found is kept until one of them changes.
    """
    root = Path(lm_eval.tasks.__file__).parent
    stamps = sorted(
        (str(path.relative_to(root)), (found := path.stat()).st_mtime_ns, found.st_size)
        for path in root.rglob("*.yaml")
    )
    kept = cache_root() / f"lm-eval-tasks-{hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]}.json"
    if kept.is_file():
        rows = json.loads(kept.read_text(encoding="utf-8"))
    else:
        rows = [
            (name, one.kind.name, one.yaml_path and str(Path(one.yaml_path).relative_to(root)), sorted(one.tags))
            for name, one in TaskIndex().build([root]).items()
        ]
        with failing_in_one_line(kept.parent):
            kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(rows))
    return {
        name: Entry(name=name, kind=Kind[kind], yaml_path=path and root / path, tags=set(tags))
        for name, kind, path, tags in rows
    }


class _LocalFactory(TaskFactory):
    """Reads each task's file, and has its data set looked for at home."""

    def __init__(self, data_root: Path, notes: dict[str, list[str]]) -> None:
        super().__init__()
        self._root, self._notes = data_root, notes

    def _load_full_config(self, entry: Entry, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        config = super()._load_full_config(entry, overrides)
        path = config.get("dataset_path")
        if path is not None and path not in _FORMATS and not Path(path).exists():
            self._notes[str(config["task"])] = _localise(config, str(config["task"]), path, self._root)
        return config


def _localise(config: dict[str, Any], task: str, path: str, root: Path) -> list[str]:
    """Point ``config`` to the folder; returns what had to be left out."""
    folder = root / path
    if not folder.is_dir():
        names = sorted(name for name, one in BENCHMARKS.items() if one.repo == path)
        fetched = f"run llmstack fetch --what {names[0]} on a node with internet and" if names else "put it there, or"
        raise UserError(f"task {task}: no folder {folder}; {fetched} give the folder that has {path} as --data-root")
    name = config.get("dataset_name")
    try:
        have = datasets.get_dataset_split_names(str(folder), name)
    except (ValueError, OSError) as error:
        raise UserError(f"task {task}: {folder} has no data set {name or ''} ({str(error).splitlines()[0]})") from error
    config["dataset_path"] = str(folder)
    notes = []
    for key in _SPLITS:
        if config.get(key) is not None and config[key] not in have:
            notes.append(f"no {config[key]} split here")
            config[key] = None
    if config.get("test_split") is None and config.get("validation_split") is None:
        raise UserError(f"task {task}: {folder} has no split to evaluate on; it has {', '.join(have)}")
    if config.get("fewshot_split") is None and config.get("training_split") is None:
        # lm-eval leaves the question itself out of its examples only where it knows that both are of one split.
        evaluated = config["test_split"] or config["validation_split"]
        if config.get("test_split") is not None and config.get("validation_split") is None:
            config["fewshot_split"] = evaluated
        shots = config.get("validation_split") or evaluated
        notes.append(f"examples are taken from the {shots} split")
    return notes


def by_itself(progress: bool) -> None:
    """Have lm-eval and its libraries look for nothing on the hub and say nothing of what they do.

    An absent set is an error at once, not after a time-out; what concerns the user is said by us.

    Args:
        progress: show bars.
    """
    # Their variables of the environment are read when they are loaded, and would be handed on to other programs.
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    for name in ("lm_eval", "lm-eval", "datasets", "transformers", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not progress:
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
