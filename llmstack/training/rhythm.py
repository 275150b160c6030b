"""Where a run lies, how often it saves, validates and looks after itself."""

from __future__ import annotations

from dataclasses import dataclass

from llmstack.errors import UserError
from llmstack.store import is_remote


@dataclass(frozen=True)
class RunConfig:
    """The run folder and its rhythm, in optimiser steps."""

    dir: str | None = None
    """Run folder; null: runs/<names of the configuration files>."""
    mirror: str | None = None
    """Address (s3://bucket/name) to which each checkpoint is copied, and from which a lost folder is made again."""
    checkpoint_every: int | None = 25
    """Steps between two checkpoints; null: not by steps."""
    checkpoint_every_minutes: float | None = None
    """Minutes between two checkpoints; null: not by time."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep (at least 2, so that a broken one has a predecessor)."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss (a validation that is the best so far is saved)."""
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this; null: none."""
    validate_every: int | None = 100
    """Steps between two validations; null: only at the end."""
    abort_after_skipped: int = 5
    """Steps skipped in a row, for gradients that are not finite, after which the run saves and ends."""
    compare_ranks_every: int | None = 100
    """Steps between two comparisons of the weights that all ranks must hold alike; null: never."""
    hang_minutes: float = 30.0
    """Minutes without progress of any rank after which the run ends; the first step compiles, the largest saves."""
    max_requeues: int = 100
    """Times that one Slurm job may be queued again by itself."""
    max_stalled_requeues: int = 3
    """Times that it may be so without a step in between, before it ends for good."""
    diagnose_every: int | None = 50
    """Steps between two looks inside the model, which diagnostics.csv keeps; null: never."""
    diagnose_attention: bool = False
    """Measure the entropy of attention, too, which costs more than all the rest."""
    evaluate_every: int | None = None
    """Steps between two evaluations of evaluate_tasks; null: none."""
    evaluate_tasks: str = "python_reference"
    """Tasks of lm-eval, as of `llmstack evaluate`, with commas between them."""
    evaluate_num_fewshot: int | None = None
    """Examples before each question; null: as many as each task says."""
    evaluate_limit: int | None = 100
    """Documents of each task, the first ones; null: all."""
    evaluate_data_root: str | None = None
    """Holds the tasks' data sets; null: $LLMSTACK_DATA, or ~/.cache/llmstack/hub."""
    profile_steps: str | None = None
    """Steps to profile, as 10 or 10-12: traces (and, on GPUs, memory snapshots) go to logs/profile; null: none."""

    def __post_init__(self) -> None:
        rates = (
            *("checkpoint_every", "checkpoint_every_minutes", "keep_every"),
            *("validate_every", "compare_ranks_every", "diagnose_every", "evaluate_every", "evaluate_limit"),
        )
        for name in (*rates, "abort_after_skipped", "hang_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"run.{name} is {value}; it must be above 0{', or null' if name in rates else ''}")
        for name in ("max_requeues", "max_stalled_requeues"):
            if getattr(self, name) < 0:
                raise UserError(f"run.{name} is {getattr(self, name)}; it must be at least 0")
        if self.mirror is not None and not is_remote(self.mirror):
            raise UserError(f"run.mirror is {self.mirror}; it must be an address, as s3://bucket/name or file:///path")
        if self.keep_checkpoints < 2:
            raise UserError(f"run.keep_checkpoints is {self.keep_checkpoints}; it must be at least 2")
        if self.profile_steps is not None:
            self.steps_to_profile()

    def checkpoints_on_disk(self, max_steps: int) -> int:
        """How many there are at most: those that are kept, and one more while the next is written."""
        every = max_steps // self.keep_every if self.keep_every else 0
        return self.keep_checkpoints + self.keep_best + every + 1

    def validation_due(self, step: int) -> bool:
        """Whether ``step`` is followed by a validation during training."""
        return self.validate_every is not None and step % self.validate_every == 0

    def diagnosis_due(self, step: int) -> bool:
        """Whether the model is looked into after ``step``."""
        return self.diagnose_every is not None and step % self.diagnose_every == 0

    def evaluation_due(self, step: int) -> bool:
        """Whether the tasks are asked after ``step``."""
        return self.evaluate_every is not None and step % self.evaluate_every == 0

    def steps_to_profile(self) -> range:
        """The steps of ``profile_steps``."""
        first, _, last = (self.profile_steps or "0-0").partition("-")
        try:
            steps = range(int(first), int(last or first) + 1)
        except ValueError:
            steps = range(0)
        if self.profile_steps is not None and (not steps or steps.start < 1):
            raise UserError(f"run.profile_steps is {self.profile_steps}; it must be a step or a range, as 10-12")
        return steps
