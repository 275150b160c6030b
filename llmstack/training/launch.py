"""Who has started the ranks of a run, and how they find each other: this command, Slurm's ``srun``, or ``torchrun``."""

from __future__ import annotations

import os
import zlib

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from llmstack.errors import UserError

FIRST_PORT, PORTS = 20000, 12000
"""Below those that Linux gives to whoever asks for any (from 32768)."""


class SlurmTasks(ClusterEnvironment):
    """One rank for each task of an ``srun`` step, whatever the job is called and however it was asked for.

    The port where they meet is a hash of the whole job and step number and of how often the job was started again, so
    jobs on one node do not share it, and one that found it taken has another after a requeue. ``MASTER_PORT`` and
    ``MASTER_ADDR`` decide where they are set.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """By srun."""
        return True

    @property
    def main_address(self) -> str:
        """The first node of the step."""
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_NODELIST"]
        return os.environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes)

    @property
    def main_port(self) -> int:
        """Where rank 0 listens."""
        if given := os.environ.get("MASTER_PORT"):
            return int(given)
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        step = ".".join(os.environ.get(name, "0") for name in names)
        return FIRST_PORT + zlib.crc32(step.encode()) % PORTS

    @staticmethod
    def detect() -> bool:
        """Whether this process is one of several tasks of a step."""
        return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in os.environ

    def world_size(self) -> int:
        """Number of tasks."""
        return int(os.environ["SLURM_STEP_NUM_TASKS"])

    def set_world_size(self, size: int) -> None:
        """Srun has decided."""

    def global_rank(self) -> int:
        """Number of this task."""
        return int(os.environ["SLURM_PROCID"])

    def set_global_rank(self, rank: int) -> None:
        """Srun has decided."""

    def local_rank(self) -> int:
        """Number of this task on its node."""
        return int(os.environ["SLURM_LOCALID"])

    def node_rank(self) -> int:
        """Number of this node."""
        return int(os.environ["SLURM_NODEID"])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a step of another shape than the run's, which would wait for tasks that nobody starts.

        Raises:
            UserError: say so.
        """
        tasks, nodes = self.world_size(), int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        if (nodes, tasks) != (num_nodes, num_nodes * num_devices):
            raise UserError(
                f"srun has started {tasks} tasks on {nodes} nodes, but the run wants {num_devices} on each of "
                f"{num_nodes}: give srun --nodes={num_nodes} --ntasks-per-node={num_devices}, or the run "
                f"--trainer.num_nodes {nodes} --trainer.devices {tasks // nodes}"
            )


def cluster_environment() -> ClusterEnvironment:
    """How the ranks of this process's run were started. Ranks that nobody has started, the run starts itself."""
    for environment in (TorchElasticEnvironment, SlurmTasks):
        if environment.detect():
            return environment()
    return LightningEnvironment()
