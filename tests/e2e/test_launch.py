"""How ranks are started and meet: by srun under any job name and number, by torchrun, or by the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack.training.launch import FIRST_PORT, PORTS, SlurmTasks, cluster_environment
from tests.e2e.conftest import environment
from tests.e2e.job import LAYOUTS, ROOT, TINY, exact_rows, finished

RHYTHM = ["--trainer.max_steps", "6", "--run.checkpoint_every", "3", "--run.validate_every", "null"]
DDP = [*LAYOUTS["ddp on 2"], *RHYTHM]


def step(job: str, rank: int, **more: str) -> dict[str, str]:
    """Variables that srun gives to a rank of two on one node."""
    names = {"JOB_ID": job, "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "1", "NODEID": "0"}
    names |= {"PROCID": str(rank), "LOCALID": str(rank), "STEP_NODELIST": "localhost", "NTASKS": "2"}
    return {**{f"SLURM_{name}": value for name, value in names.items()}, **more}


def start(run: Path, variables: dict[str, str], *before: str) -> subprocess.Popen[str]:
    command = [*before, "-m", "llmstack", "fit", *TINY, *DDP, "--run.dir", str(run)]
    return subprocess.Popen(
        [sys.executable, *command],
        env={**environment(), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(600)
def test_jobs_whose_numbers_end_alike_run_at_once_on_one_machine(tmp_path: Path) -> None:
    """Under the names `bash` and `interactive`, too, which others take for no job at all. All compute the same."""
    jobs = {"10004321": "bash", "20004321": "interactive"}
    ranks = [
        (tmp_path / job, start(tmp_path / job, step(job, rank, SLURM_JOB_NAME=name)))
        for job, name in jobs.items()
        for rank in (0, 1)
    ]
    for _, process in ranks:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    finished(tmp_path / "plain", *DDP)
    rows = [exact_rows(tmp_path / name) for name in (*jobs, "plain")]
    assert len(rows[2]) == 6
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.timeout(300)
def test_torchrun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(run, {}, *launcher)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert [row[0] for row in exact_rows(run)] == [1, 2, 3, 4, 5, 6]


def test_a_step_of_another_shape_is_refused_at_once(tmp_path: Path) -> None:
    """Two tasks, but the run wants three ranks: it would wait for the third for ever."""
    command = [sys.executable, "-m", "llmstack", "fit", *TINY, *DDP, "--trainer.devices", "3"]
    done = subprocess.run(
        [*command, "--run.dir", str(tmp_path / "run")],
        env={**environment(), "PYTHONPATH": str(ROOT), **step("7", 0)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "srun has started 2 tasks on 1 nodes, but the run wants 3" in line
    assert "--ntasks-per-node=3" in line


class TestMeeting:
    """Where ranks meet, from the environment alone."""

    @pytest.fixture(autouse=True)
    def no_other_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_")):
                monkeypatch.delenv(name)

    def port(self, monkeypatch: pytest.MonkeyPatch, **variables: str) -> int:
        for name, value in step("10004321", 1, **variables).items():
            monkeypatch.setenv(name, value)
        environment = cluster_environment()
        assert isinstance(environment, SlurmTasks)
        assert (environment.world_size(), environment.global_rank()) == (2, 1)
        return environment.main_port

    def test_every_job_step_and_restart_has_a_port_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        others = [{"SLURM_JOB_ID": f"{n}4321"} for n in range(2, 30)]
        others += [{"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "2"}]
        ports = [self.port(monkeypatch)]
        for variables in others:
            for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"):
                monkeypatch.delenv(name, raising=False)
            ports.append(self.port(monkeypatch, **variables))
        assert len(set(ports)) == len(ports)
        assert all(FIRST_PORT <= port < FIRST_PORT + PORTS <= 32768 for port in ports)

    def test_a_given_port_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.port(monkeypatch, MASTER_PORT="4567") == 4567

    def test_the_first_node_of_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port(monkeypatch, SLURM_STEP_NODELIST="gpu[07-09,12],login1")
        assert cluster_environment().main_address == "gpu07"

    def test_one_task_starts_its_own_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A batch shell without srun, or `srun --pty bash`: the command starts the ranks, as it does elsewhere."""
        for name, value in step("7", 0, SLURM_STEP_NUM_TASKS="1").items():
            monkeypatch.setenv(name, value)
        assert not cluster_environment().creates_processes_externally
