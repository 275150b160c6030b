"""Jobs on a real Slurm of two nodes: what a user submits is finished, or honestly stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from llmstack.cli.main import main
from llmstack.cluster import JobRecord
from tests.e2e.job import ROOT, TINY, callbacks, exact_rows, finished, lines_of, newest, rows_of
from tests.slurm.conftest import Cluster

full = pytest.mark.full

ZERO2 = ["-c", "trainer/zero2.yaml", "--trainer.precision", "32-true", "--data.micro_batch_size", "2"]
"""On two ranks, 4 samples a step."""

ON_TWO_NODES = ["--nodes", "2", "--cpu-ranks-per-node", "1", "--mem", "1G"]


class SubmittedRun:
    """A run that ``submit`` has put into the queue."""

    def __init__(self, cluster: Cluster, run: Path, *arguments: str, base: Sequence[str] = (*TINY, *ZERO2)) -> None:
        self.cluster, self.path = cluster, run
        command = ["submit", *base, *arguments, "--run.dir", str(run)]
        self.jobs = self.llmstack(*command).stdout.split()
        self.job = self.jobs[0]

    def llmstack(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the user, in the folder of the run's."""
        done = subprocess.run(
            [sys.executable, "-m", "llmstack", *arguments],
            cwd=self.path.parent,
            env={**self.cluster.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done

    def wait_for(self, condition: Any, timeout: float) -> None:
        self.cluster.wait_for(condition, timeout, self.told)

    def wait_until_at(self, step: int, timeout: float = 240) -> None:
        """Return when metrics.csv has the row of ``step``."""
        self.wait_for(lambda: bool((rows := rows_of(self.path)) and rows[-1]["step"] >= step), timeout)

    def wait_for_state(self, state: str, timeout: float, job: str | None = None) -> None:
        self.wait_for(lambda: self.cluster.state(job or self.job) == state, timeout)

    def told(self) -> str:
        """All that the job has said."""
        logs = sorted((self.path / "logs").glob("*"))
        events = json.dumps(self.events(), indent=1)
        return (
            self.cluster.run("squeue", "-t", "all")
            + events
            + "".join(f"\n== {log.name}\n{log.read_text(errors='replace')}" for log in logs if log.is_file())
        )

    def events(self, *which: str) -> list[dict[str, Any]]:
        return [event for event in JobRecord(self.path).read() if not which or event["event"] in which]

    def processes(self) -> dict[int, int]:
        """The ranks that train, by number."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = dict(
                    one.split(b"=", 1) for one in (folder / "environ").read_bytes().split(b"\0") if b"=" in one
                )
            except OSError:
                continue
            if b"fit" in words and os.fsencode(self.path) in words and b"srun" not in words[0]:
                found[int(variables[b"SLURM_PROCID"])] = int(folder.name)
        return found

    def cancel(self) -> None:
        for job in self.jobs:
            subprocess.run(["scancel", job], env=self.cluster.environ, timeout=60)


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """``submit("name", ...)``; what is still in the queue at the end of the test is taken out."""
    runs: list[SubmittedRun] = []

    def submitted(name: str, *arguments: str, **options: Any) -> SubmittedRun:
        runs.append(SubmittedRun(cluster, tmp_path / name, *arguments, **options))
        return runs[-1]

    yield submitted
    for run in runs:
        run.cancel()


def uninterrupted(tmp_path: Path, *arguments: str) -> Path:
    """The same run on two bare ranks, without Slurm."""
    run = tmp_path / "uninterrupted"
    finished(run, *ZERO2, *arguments, "--trainer.devices", "2", "--trainer.accelerator", "cpu")
    return run


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cycles", [1, pytest.param(3, marks=full)])
def test_a_job_outlives_its_time_limit_and_loses_nothing(cycles: int, submit: Any, tmp_path: Path) -> None:
    """Slurm itself gives the signal, near the limit; the job saves, comes back, goes on at the next step and finishes;
    then, from the same command, perplexity and a report. Steps, samples and losses are those of an uninterrupted run.
    """
    text = tmp_path / "held-out.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    seen, reference = tmp_path / "seen", tmp_path / "reference"
    for folder in (seen, reference):
        folder.mkdir()
    data = ["-c", "data/embedded.yaml", "--data.embedded_vocab_size", "512", "--data.block_size", "32"]
    steps = 100 * cycles
    options = [*data, *ZERO2, "--trainer.max_steps", str(steps), "--run.validate_every", "50"]
    options += ["--run.checkpoint_every", "1000", "--run.diagnose_every", "null"]
    pace = callbacks(tmp_path, Record={"folder": str(seen)}, Orders={"folder": str(tmp_path), "pace": 0.05})
    limit = ["--time", "3", "--signal-seconds", "60"]
    run = submit("run", *options, *pace, *ON_TWO_NODES, *limit, "--evaluate", str(text), base=TINY)
    fit, evaluation = run.jobs
    log = run.path / "logs" / f"slurm-{fit}-rank-0.log"
    for cycle in range(cycles):
        run.wait_until_at(100 * cycle + 20)
        (tmp_path / "hold").touch()  # within a step, until the time is nearly over
        run.wait_for(lambda cycle=cycle: log.read_text().count("SIGUSR1: stopping") > cycle, 240)
        (tmp_path / "hold").unlink()
        run.wait_for(lambda cycle=cycle: len(run.events("requeued")) > cycle, 60)
    run.wait_for_state("COMPLETED", 600)

    requeued = run.events("requeued")
    assert len(requeued) >= cycles, run.told()  # more where this machine is so slow that a life ends without the hold
    assert {event["reason"] for event in requeued} == {"stopped by SIGUSR1"}
    assert [event["restart"] for event in requeued] == list(range(len(requeued)))
    assert [event["job"] for event in run.events("started")] == [fit] * (len(requeued) + 1)
    stopped_at = [event["step"] for event in requeued]
    assert stopped_at[0] > 0
    assert stopped_at[-1] < steps

    plain = callbacks(reference, Record={"folder": str(reference)})
    whole = uninterrupted(tmp_path, *options, *plain)
    assert exact_rows(run.path) == exact_rows(whole)
    assert lines_of(seen, "samples") == lines_of(reference, "samples")
    assert (run.path / "logs" / f"slurm-{fit}-rank-1.log").is_file()
    assert f"resuming {run.path} from step {stopped_at[0]} of {steps}" in run.told()

    run.wait_for_state("COMPLETED", 120, evaluation)
    measured = json.loads((run.path / "evaluation" / "perplexity-held-out.txt.json").read_text())
    assert measured["perplexity"] > 1
    page = (run.path / "report" / "report.html").read_text()
    assert "held-out.txt" in page
    assert f"{measured['perplexity']:.2f}" in page
    state = run.llmstack("status", str(run.path)).stdout
    assert f"finished, step {steps} of {steps}, requeued {len(requeued)} time" in state


@full
@pytest.mark.timeout(600)
def test_a_killed_rank_ends_the_job_soon_and_it_comes_back(submit: Any, tmp_path: Path) -> None:
    pace = callbacks(tmp_path, Orders={"folder": str(tmp_path), "pace": 0.2})
    options = ["--trainer.max_steps", "40", "--run.checkpoint_every", "5", "--run.validate_every", "null"]
    run = submit("run", *options, *pace, *ON_TWO_NODES, "--time", "30")
    run.wait_until_at(8)
    ranks = run.processes()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    run.wait_for(lambda: not run.processes(), 60)
    run.wait_for(lambda: run.events("requeued"), 30)
    (event,) = run.events("requeued")
    assert event["step"] >= 5
    assert event["without"] == []
    assert "rank 1 (" in run.told()  # who was lost
    run.wait_for_state("COMPLETED", 240)
    assert exact_rows(run.path) == exact_rows(uninterrupted(tmp_path, *options))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("by", ["scancel", pytest.param("llmstack cancel", marks=full)])
def test_a_cancelled_job_has_saved_and_stays_away(by: str, submit: Any, tmp_path: Path) -> None:
    pace = callbacks(tmp_path, Orders={"folder": str(tmp_path), "pace": 0.1})
    options = ["--trainer.max_steps", "4000", "--run.checkpoint_every", "1000", "--run.validate_every", "null"]
    run = submit("run", *options, *pace, *ON_TWO_NODES, "--time", "30")
    run.wait_until_at(3)
    state = run.llmstack("status", str(run.path)).stdout
    assert state.startswith(f"{run.path}: running (job {run.job}), step ")
    if by == "scancel":
        run.cluster.run("scancel", run.job)
        run.wait_for(lambda: run.cluster.state(run.job) in ("FAILED", "CANCELLED"), 90)
    else:
        said = run.llmstack("cancel", str(run.path)).stdout
        assert f"job {run.job} has ended; saved at step {newest(run.path).step}" in said
        assert run.cluster.state(run.job) in ("FAILED", "CANCELLED")
    assert newest(run.path).step == rows_of(run.path)[-1]["step"] >= 3
    assert run.events("requeued") == []
    assert "cancelled" in run.events("ended")[0]["reason"]
    assert "cancelled" in run.llmstack("status", str(run.path)).stdout


@pytest.mark.timeout(300)
def test_a_job_that_gets_no_further_or_comes_too_often_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    """The script's own decision, in jobs that fail at once: three runs with a checkpoint that does not move."""
    limits = {"stalled": (100, 1), "often": (1, 100), "finished": (100, 100)}
    jobs = {}
    for name, (most, stalled) in limits.items():
        run = tmp_path / name
        (run / "checkpoints" / "step-00000007").mkdir(parents=True)
        (run / "config.yaml").write_text(f"run: {{max_requeues: {most}, max_stalled_requeues: {stalled}}}\n")
        if name == "finished":
            (run / "run.json").write_text('{"finished_step": 7}')
        script = run / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --requeue --open-mode=append --output={run}/log --time=5\n"
            f"trap : TERM\nexport PYTHONPATH={ROOT}\n"
            f"{sys.executable} -m llmstack requeue {run} --status 1\nsleep 2\nexit 1\n"
        )
        jobs[name] = cluster.run("sbatch", "--parsable", str(script)).strip()
    for name, job in jobs.items():
        cluster.wait_for(lambda job=job: cluster.state(job) == "FAILED", 120, (tmp_path / name / "log").read_text)
    events = {name: JobRecord(tmp_path / name).read() for name in limits}
    assert [[event["event"] for event in events[name]] for name in limits] == [
        ["requeued", "ended"],
        ["requeued", "ended"],
        ["ended"],
    ]
    assert "got no further than step 7" in events["stalled"][-1]["reason"]
    assert "as often as run.max_requeues allows" in events["often"][-1]["reason"]
    assert "the run is finished" in events["finished"][-1]["reason"]


@pytest.mark.timeout(300)
def test_what_would_fail_again_is_not_queued_again(submit: Any, tmp_path: Path) -> None:
    """The file of the data is gone when the job starts: a line names node and file, on each node one."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(topics.values()))
    data = ["-c", "data/text.yaml", "--data.files", str(text), "--data.block_size", "16", "--trainer.max_steps", "5"]
    tokenizer = tmp_path / "tokenizer"
    train = ["tokenizer", "train", "--files", str(text), "--vocab-size", "300", "--out", str(tokenizer)]
    assert main(train) == 0
    site = tmp_path / "site.yaml"
    site.write_text("sbatch: [--hold]\n")
    data += ["--data.tokenizer", str(tokenizer), "--site", str(site)]
    run = submit("run", *data, *ON_TWO_NODES, "--time", "30")
    text.unlink()
    run.cluster.run("scontrol", "release", run.job)
    run.wait_for_state("FAILED", 120)
    said = run.told()
    for node in ("n1", "n2"):
        assert f"node {node}: {text} cannot be read" in said
    (event,) = run.events("requeued", "ended")
    assert event["event"] == "ended"
    assert not (run.path / "config.yaml").exists()


@pytest.mark.timeout(300)
def test_code_that_has_changed_stops_the_job(submit: Any, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("sbatch: [--hold]\n")
    run = submit("it's a run, é", "--trainer.max_steps", "5", "--site", str(site), *ON_TWO_NODES, "--time", "30")
    (code,) = (run.path / "slurm").glob("code-*")
    with open(code / "llmstack" / "errors.py", "a") as file:
        file.write("# another line\n")
    run.cluster.run("scontrol", "release", run.job)
    run.wait_for_state("FAILED", 120)
    assert f"the code of this job, {code}, is gone or changed" in run.told()
    assert run.events("requeued") == []


@full
@pytest.mark.timeout(900)
def test_a_lost_node_is_left_behind(submit: Any, tmp_path: Path, cluster: Cluster) -> None:
    """Its daemon and all its processes are gone at once; Slurm queues the job again, and it goes on with the other node
    alone, which accumulates twice: the same samples, and to rounding the same losses.
    """
    pace = callbacks(tmp_path, Orders={"folder": str(tmp_path), "pace": 0.2})
    options = ["--trainer.max_steps", "40", "--run.checkpoint_every", "5", "--run.validate_every", "null"]
    run = submit("run", *options, *pace, *ON_TWO_NODES, "--min-nodes", "1", "--time", "30")
    run.wait_until_at(8)
    lost = run.processes()[1]
    stepd = int(Path(f"/proc/{lost}/stat").read_text().rpartition(")")[2].split()[1])
    try:
        for process in (int((cluster.folder / "slurmd-n2.pid").read_text()), stepd, lost):
            os.kill(process, signal.SIGKILL)
        run.wait_for_state("COMPLETED", 420)
        assert run.events("started")[-1]["nodes"] == "n1"
        assert [row["step"] for row in rows_of(run.path)] == list(range(1, 41))
        whole = uninterrupted(tmp_path, *options)
        losses = [[row["loss"] for row in rows_of(path)] for path in (run.path, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    finally:
        cluster.start_node("n2")


@full
@pytest.mark.timeout(900)
def test_a_sweep_trains_every_point_and_measures_the_best(submit: Any, tmp_path: Path) -> None:
    """One array job, one after the other; then perplexity and report of the point with the lowest validation loss."""
    text = tmp_path / "held-out.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    sweep = tmp_path / "rates.yaml"
    sweep.write_text("rate: ['--model.optimizer.lr 1e-6', '--model.optimizer.lr 1e-2']\n")
    data = ["-c", "data/embedded.yaml", "--data.embedded_vocab_size", "512", "--data.block_size", "32"]
    options = [*data, "-c", "trainer/cpu.yaml", "--trainer.max_steps", "20", "--run.validate_every", "null"]
    more = ["--cpu-ranks-per-node", "1", "--mem", "1G", "--time", "30", "--evaluate", str(text)]
    run = submit("sweep", *options, "--sweep", str(sweep), "--at-once", "1", *more, base=TINY)
    run.wait_for_state("COMPLETED", 400, run.jobs[1])
    losses = [rows_of(run.path / point)[-1]["val_loss"] for point in ("0000", "0001")]
    assert losses[1] < losses[0] - 0.1
    assert not (run.path / "0000" / "report").exists()
    assert "held-out.txt" in (run.path / "0001" / "report" / "report.html").read_text()
    states = run.llmstack("status", str(run.path)).stdout.splitlines()
    assert [line.split(",")[0] for line in states] == [f"{run.path}/{point}: finished" for point in ("0000", "0001")]
    assert {event["job"] for event in JobRecord(run.path / "0001").read()} == {f"{run.job}_1"}
