"""Where a run lies and how often it saves and validates."""

from __future__ import annotations

from dataclasses import dataclass

from llmstack.errors import UserError


@dataclass(frozen=True)
class RunConfig:
    """The run folder and its rhythm, in optimiser steps."""

    dir: str | None = None
    """Run folder; null: runs/<names of the configuration files>."""
    checkpoint_every: int | None = 25
    """Steps between two checkpoints; null: not by steps."""
    checkpoint_every_minutes: float | None = None
    """Minutes between two checkpoints; null: not by time."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep (at least 2, so that a broken one has a predecessor)."""
    validate_every: int | None = 100
    """Steps between two validations; null: only at the end."""

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "checkpoint_every_minutes", "validate_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"run.{name} is {value}; it must be above 0, or null")
        if self.keep_checkpoints < 2:
            raise UserError(f"run.keep_checkpoints is {self.keep_checkpoints}; it must be at least 2")

    def validation_due(self, step: int) -> bool:
        """Whether ``step`` is followed by a validation during training."""
        return self.validate_every is not None and step % self.validate_every == 0
