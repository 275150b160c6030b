"""How tasks are asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmstack.errors import UserError

DEFAULT_SEED = 1234
"""lm-eval's, of the draws of examples."""

PAPER_TASKS = ("arc_challenge", "arc_easy", "piqa", "hellaswag", "openbookqa", "winogrande", "mmlu", "boolq")
"""The eight of the BHyT paper (Table 1)."""


@dataclass(frozen=True)
class Settings:
    """How tasks are asked."""

    tasks: Sequence[str]
    """Names, groups, or files."""
    num_fewshot: int | None = None
    """Examples before each question; null: as many as each task says."""
    limit: int | None = None
    """Documents of each task, the first ones; null: all."""
    fewshot_seeds: Sequence[int] = (DEFAULT_SEED,)
    """Of the draws of examples; each is an evaluation of its own."""
    chat: bool = False
    """Ask through the chat template."""
    system_instruction: str | None = None
    """Before everything else."""
    fewshot_as_multiturn: bool = True
    """In a chat, examples are turns of the conversation."""


def task_names(text: str) -> list[str]:
    """Names with commas between them; ``paper`` stands for :data:`PAPER_TASKS`.

    Raises:
        UserError: none.
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    tasks = [task for name in names for task in (PAPER_TASKS if name == "paper" else (name,))]
    if not tasks:
        raise UserError("evaluation: no tasks given")
    return list(dict.fromkeys(tasks))
