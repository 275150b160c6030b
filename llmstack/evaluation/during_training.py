"""Tasks of lm-eval for a model that is training: :class:`~llmstack.training.callbacks.Evaluation` calls this."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from llmstack.accounting.parameters import count_parameters
from llmstack.evaluation.harness import HarnessModel
from llmstack.evaluation.results import FOLDER, evaluate, file_name, record, write
from llmstack.evaluation.settings import Settings
from llmstack.evaluation.tasks import OfflineTasks, by_itself
from llmstack.hub import hub_root
from llmstack.model import Llama
from llmstack.ranks import Ranks
from llmstack.tokenizer import BosEosPolicy, Tokenizer


class TaskEvaluation:
    """Asks what ``settings`` say; the results lie in the run as those of `llmstack evaluate` do.

    Args:
        tokenizer: of the training data.
        policy: whether texts begin with BOS.
        run: its folder.
        settings: what is asked.
        data_root: holds the tasks' data sets; none: the hub's folder.

    Raises:
        UserError: a task that does not exist.
    """

    def __init__(
        self, tokenizer: Tokenizer, policy: BosEosPolicy, run: Path, settings: Settings, data_root: str | None
    ) -> None:
        by_itself(progress=False)
        self._tokenizer, self._policy, self._run, self._settings = tokenizer, policy, run, settings
        self._manager = OfflineTasks(Path(data_root).expanduser() if data_root else hub_root())
        self._manager.check(settings.tasks)

    def __call__(self, model: Llama, step: int, ranks: Ranks, beat: Callable[[], None]) -> dict[str, float]:
        """Every metric of every task and group."""
        weight = model.embed_tokens.weight
        asked = HarnessModel(
            model,
            dtype="bf16" if weight.element_size() == 2 else "fp32",
            fold=False,
            device=weight.device,
            tokenizer=self._tokenizer,
            policy=self._policy,
            compile=False,
            ranks=ranks,
            beat=beat,
        )
        found = evaluate(asked, self._manager, self._settings)
        if ranks.is_first:
            checkpoint = {
                "ckpt": str(self._run),
                "path": None,
                "sha256": None,
                "step": step,
                "parameters": count_parameters(model.config).total,
                "norm": model.config.norm_method.name,
            }
            written = record(found, asked, checkpoint, self._settings, ["llmstack", *sys.argv[1:]])
            write(self._run / FOLDER / file_name(written), written)
        return {
            f"{name} {metric}": values["mean"]
            for name, one in found.summary.items()
            for metric, values in one["metrics"].items()
        }
