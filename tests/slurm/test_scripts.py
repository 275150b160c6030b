"""Batch scripts, line by line, and as Slurm itself reads them."""

import re
import subprocess
from pathlib import Path

import pytest

from llmstack.cli.main import main
from tests.e2e.job import TINY
from tests.slurm.conftest import Cluster

FILES = {
    "broken.yaml": "setup: if true; then\n",
    "accumulate.yaml": "a: ['--trainer.accumulate_grad_batches 1', '--trainer.accumulate_grad_batches 4']\n",
    "bad.yaml": "lr: ['--model.optimizer.lr 1e-3', '--model.optimizer.lr -1']\n",
    "dir.yaml": "a: ['--run.dir elsewhere']\n",
    "a b.txt": "text",
    "a-b.txt": "text",
}
"""What some of the arguments below name."""


def dry_run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The script that ``submit`` prints."""
    trainer = ["-c", "trainer/zero2.yaml", "--trainer.max_steps", "12", "--run.dir", str(folder / "run")]
    assert main(["submit", *TINY, *trainer, *arguments, "--dry-run"]) == 0
    assert not (folder / "run").exists()
    return capsys.readouterr().out


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 8), (16, 4)])
def test_every_number_is_the_same_everywhere_and_slurm_takes_it(
    nodes: int, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: Cluster
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("partition: paper\ncpus_per_node: 128\n")
    shape = ["--nodes", str(nodes), "--gpus-per-node", str(gpus), "--time", "2-12:30", "--signal-seconds", "300"]
    script = dry_run(tmp_path, capsys, *shape, "--mem", "500G", "--site", str(site))
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))
    cpus = str(128 // gpus)
    assert directives == {
        "job-name": "run",
        "nodes": str(nodes),
        "ntasks-per-node": str(gpus),
        "cpus-per-task": cpus,
        "mem": "500G",
        "time": "2-12:30",
        "signal": "USR1@300",  # to the ranks; with B: the batch shell alone would get it
        "requeue": "",
        "open-mode": "append",
        "output": f"{tmp_path}/run/logs/slurm-%j.out",
        "gpus-per-node": str(gpus),
        "partition": "paper",
    }
    assert "\nexport LLMSTACK_STOP_SIGNAL=USR1\n" in script  # whatever else the user's shell says
    (step,) = re.findall(r"^ +srun (.*?)\"\$PYTHON\"", script, re.MULTILINE | re.DOTALL)
    options = dict(re.findall(r"--([\w-]+)=(\S+)", step))
    assert f"\nNODES={nodes}\n" in script
    assert (options["nodes"], options["ntasks-per-node"]) == ('"$NODES"', str(gpus))
    assert options["cpus-per-task"] == cpus  # sbatch's own does not reach srun
    assert options["output"] == '"$RUN/logs/slurm-%j-rank-%t.log"'
    file = tmp_path / "script.sh"
    file.write_text(script)
    told = subprocess.run(["sbatch", "--test-only", str(file)], env=cluster.environ, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert (
        f"using {nodes * 128} processors" in told.stderr
        or f"using {nodes * int(cpus) * gpus} processors" in told.stderr
    )
    assert subprocess.run(["bash", "-n", str(file)]).returncode == 0


def test_the_site_file_reaches_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(
        "account: proj7\nqos: long\nconstraint: a100\nexclude: bad[1-2]\nmodules: [cuda/12.8, gcc]\n"
        "setup: |\n  export NCCL_SOCKET_IFNAME=ib0\nsrun: [--container-image=/images/a b.sqsh]\nsbatch: [--exclusive]\n"
    )
    script = dry_run(tmp_path, capsys, "--gpus-per-node", "2", "--time", "60", "--site", str(site))
    for line in ("account=proj7", "qos=long", "constraint=a100", "exclude=bad[1-2]", "exclusive"):
        assert f"#SBATCH --{line}\n" in script
    assert "\nmodule load cuda/12.8 gcc\nexport NCCL_SOCKET_IFNAME=ib0\n" in script
    assert "'--container-image=/images/a b.sqsh' \"$PYTHON\" -m llmstack" in script


def test_fewer_nodes_keep_the_samples_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 nodes one is lost: 2 go on, with twice the accumulation; of those one is: 1 goes on; then none may."""
    accumulate = ["--trainer.accumulate_grad_batches", "3"]
    shape = ["--nodes", "4", "--min-nodes", "1", "--gpus-per-node", "1", "--time", "60"]
    script = dry_run(tmp_path, capsys, *accumulate, *shape)
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --no-kill\n" in script
    loop = script[script.index("while true") : script.index("# The ranks have queued")]
    stand_ins = """
        NODES=4 patience=0 lost=0 SLURM_JOB_ID=1
        left() { echo $((4 - lost)); }
        sleep() { :; }
        train() { echo "$@"; ((lost += lost ? 2 : 1)); return 1; }
    """
    asked = subprocess.run(["bash", "-c", stand_ins + loop], capture_output=True, text=True)
    assert asked.stdout.splitlines() == [
        f"--trainer.num_nodes {nodes} --trainer.accumulate_grad_batches {12 // nodes}" for nodes in (4, 2, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus-per-node", "0"], "at least 1"),
        (["--nodes", "-1"], "at least 1"),
        (["--time", "tomorrow"], "--time is tomorrow"),
        (["--time", "3"], "leaves no time to train"),
        (["--mem", "a lot"], "--mem is a lot"),
        (["--min-nodes", "2"], "--min-nodes is 2"),
        (["--at-once", "2"], "--sweep"),
        (["--evaluate", "nowhere.txt"], "nowhere.txt"),
        (["--site", "nowhere.yaml"], "nowhere.yaml"),
        (["--sweep", "nowhere.yaml"], "nowhere.yaml"),
        (["--run.dir", "100%"], "Slurm reads %"),
        (["--trainer.max_steps", "0"], "max_steps"),
        (["--trainer.devices", "7"], "--trainer.devices"),
        (["--site", "broken.yaml"], "no valid bash"),
        (
            ["--sweep", "accumulate.yaml", "--nodes", "2", "--min-nodes", "1"],
            "the same trainer.accumulate_grad_batches",
        ),
        (["--sweep", "bad.yaml"], "point 0001 (--model.optimizer.lr -1)"),
        (["--sweep", "dir.yaml"], "--run.dir is not for it"),
        (["--evaluate", "a b.txt", "--evaluate", "a-b.txt"], "would both be called a-b.txt"),
        (["--run.dir", "a b.txt/run"], "is a file"),
        (["-c", "data/embedded.yaml", "--data.block_size", "9000"], "9000"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = ["-c", "trainer/zero2.yaml", "--trainer.max_steps", "12", "--run.dir", str(tmp_path / "run")]
    base = ["--gpus-per-node", "1", "--time", "60"]
    assert main(["submit", *TINY, *run, *base, *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert words in line
    assert {path.name for path in tmp_path.iterdir()} == FILES.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acount: me\n", "acount is unknown"),
        ("cpus_per_node: many\n", "cpus_per_node is 'many'; it must be a number"),
        ("modules: cuda\n", "modules is 'cuda'; it must be a list"),
        ("- account\n", "holds no mapping"),
        ("account: [\n", "not readable"),
    ],
)
def test_a_wrong_site_file_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text(text)
    arguments = ["--gpus-per-node", "1", "--time", "60", "--site", str(tmp_path / "site.yaml"), "--dry-run"]
    assert main(["submit", *TINY, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert str(tmp_path / "site.yaml") in line
