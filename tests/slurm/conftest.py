"""A real Slurm of two nodes on this machine, and sixteen more that exist on paper, for ``sbatch --test-only``."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NODES = ("n1", "n2")

CONF = r"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=cred_expire=15
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=1,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmdTimeout=30
MpiDefault=none
GresTypes=gpu
{nodes}
NodeName=p[1-16] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{paper}] CPUs=128 RealMemory=900000 Gres=gpu:8 \
State=CLOUD
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=paper Nodes=p[1-16] MaxTime=INFINITE State=UP
"""


class Cluster:
    """Slurm's daemons, started here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        (folder / "state").mkdir()
        host = socket.gethostname()
        ports = _free_ports(3)
        first = 21000 + os.getpid() % 200 * 16
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=8000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        text = CONF.format(host=host, port=ports[0], dir=folder, nodes="\n".join(lines), paper=f"{first}-{first + 15}")
        self.conf.write_text(text)
        (folder / "gres.conf").write_text("AutoDetect=off\nNodeName=p[1-16] Name=gpu Count=8\n")
        hosts = Path("/etc/hosts")
        for name in NODES:
            if name not in hosts.read_text().split():
                with hosts.open("a") as file:
                    file.write(f"127.0.0.1 {name}\n")

    def start(self) -> None:
        """Return when both nodes are idle."""
        _start_munge()
        self.run("slurmctld", "-c", "-f", str(self.conf))
        for name in NODES:
            self.start_node(name)
        until = time.monotonic() + 60
        while self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").strip() != "2":
            assert time.monotonic() < until, self.run("sinfo")
            time.sleep(0.5)

    def start_node(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self.run("slurmd", "-c", "-N", name, "-f", str(self.conf))

    def stop(self) -> None:
        for how in ([], ["--signal=KILL", "--full"]):
            subprocess.run(["scancel", "--user=root", *how], env=self.environ, timeout=60)
        self.wait_for(lambda: not self.run("squeue", "-h").strip(), 120)
        daemons = [int(file.read_text()) for file in self.folder.glob("*.pid")]
        for daemon in daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGTERM)
        self.wait_for(lambda: not any(Path(f"/proc/{daemon}").exists() for daemon in daemons), 60)

    @property
    def environ(self) -> dict[str, str]:
        """Of a user's shell on this cluster."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(self.conf),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str, **options: object) -> str:
        """Output of a command that succeeds."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """What the controller says of a job."""
        return self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").split("\n")[0]

    def wait_for(self, condition: Callable[[], object], timeout: float, told: Callable[[], str] = str) -> None:
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until, f"it did not come to that: {told()}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("needs Slurm (apt-get install slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to start Slurm's daemons")
    with tempfile.TemporaryDirectory(prefix="llmstack-slurm-") as folder:
        started = Cluster(Path(folder))
        started.start()
        yield started
        started.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _start_munge() -> None:
    """Slurm's authentication; one daemon serves the machine."""

    def works() -> bool:
        coded = subprocess.run(["munge", "-n"], capture_output=True)
        return (
            coded.returncode == 0
            and subprocess.run(["unmunge"], input=coded.stdout, stdout=subprocess.DEVNULL).returncode == 0
        )

    if works():
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=False)
    for _ in range(50):
        if works():
            return
        time.sleep(0.1)
    raise AssertionError("munged does not start")
