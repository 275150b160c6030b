"""Slurm: scripts that are checked before they are paid for, and jobs that come back."""

from llmstack.cluster.record import JobRecord
from llmstack.cluster.requeue import after_step, note_start, requeue
from llmstack.cluster.slurm import Job, SlurmError

__all__ = ["Job", "JobRecord", "SlurmError", "after_step", "note_start", "requeue"]
