"""Where runs stand, as far as their folders tell; with Slurm, see ``tests/slurm``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmstack.checkpoint import MetricsFile, RunFolder
from llmstack.checkpoint.metrics import MetricsRow
from llmstack.cli.main import main
from llmstack.cluster import JobRecord
from llmstack.cluster.requeue import Limits
from llmstack.cluster.status import status_of
from llmstack.cluster.sweep import best_run, points_in, read_sweep, write_points
from llmstack.errors import UserError
from llmstack.training.rhythm import RunConfig
from tests.e2e.job import LAYOUTS, Job, callbacks, newest, rows_of

STOP: dict[str, object] = {"step": 2, "reason": "stopped"}


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands are not on this machine."""
    monkeypatch.setenv("PATH", "/nowhere")


def make_run(folder: Path, steps: int = 4, *, val_loss: float | None = None, finished: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("trainer: {max_steps: 10}\n")
    rows = MetricsFile(folder / "metrics.csv")
    for step in range(1, steps + 1):
        row = {"step": step, "tokens_seen": 100 * step, "loss": 5.0 - step, "learning_rate": 1.0, "grad_norm": 1.0}
        row |= {"step_seconds": 2.0, "tokens_per_second": 50.0, "peak_memory_bytes": 1}
        row |= {"data_seconds": 0.0, "forward_backward_seconds": 1.0, "optimizer_seconds": 1.0}
        rows.append(MetricsRow(**row, val_loss=val_loss if step == steps else None))  # type: ignore[arg-type]
    if finished:
        RunFolder(folder).finish(steps)
    return folder


def test_numbers_come_from_the_folder(tmp_path: Path) -> None:
    found = status_of(make_run(tmp_path / "run", val_loss=2.5))
    assert (found.state, found.step, found.max_steps, found.tokens) == ("stopped", 4, 10, 400)
    assert (found.loss, found.val_loss, found.tokens_per_second) == (1.0, 2.5, 50.0)
    assert found.seconds_left == 12.0  # six steps of two seconds


@pytest.mark.parametrize(
    ("events", "state", "words"),
    [
        ([("submitted", 0, {})], "unknown", "there is no squeue"),
        (
            [("submitted", 0, {}), ("started", 0, {"step": 0}), ("requeued", 0, STOP)],
            "unknown",
            "squeue",
        ),
        ([("submitted", 0, {}), ("ended", 3, {"reason": "no progress", "step": 2})], "failed", "no progress"),
        ([("submitted", 0, {}), ("ended", 0, {"reason": "cancelled", "step": 2})], "stopped", "cancelled"),
    ],
)
def test_what_became_of_its_job(
    events: list[tuple[str, int, dict[str, object]]], state: str, words: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    for event, restart, details in events:
        JobRecord(run).add(event, "12", restart, **details)  # type: ignore[arg-type]
    found = status_of(run)
    assert found.state == state
    assert words in found.reason
    assert found.job == "12"
    assert found.requeued == max(restart + (event == "requeued") for event, restart, _ in events)


def test_limits_are_those_that_were_submitted_before_the_run_has_begun(tmp_path: Path) -> None:
    """A job that fails in its checks has no configuration but that."""
    run = RunFolder(tmp_path / "run")
    defaults = RunConfig()
    assert Limits.of(run) == Limits() == Limits(defaults.max_requeues, defaults.max_stalled_requeues)
    (run.path / "slurm").mkdir(parents=True)
    (run.path / "slurm" / "config.yaml").write_text("run: {max_requeues: 0, max_stalled_requeues: 7}\n")
    assert Limits.of(run) == Limits(0, 7)
    run.config_path.write_text("run: {max_requeues: 5}\n")
    assert Limits.of(run) == Limits(5, 3)


def test_a_line_that_a_full_disk_has_cut_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    JobRecord(run).add("submitted", "12")
    with JobRecord(run).path.open("a") as file:
        file.write('{"event": "requeu')
    assert [event["event"] for event in JobRecord(run).read()] == ["submitted"]


def test_the_last_error_of_the_newest_log_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "slurm-12-rank-0.log").write_text("step 3\nllmstack: rank 1 died\nsomething else\n")
    assert status_of(run).error == "slurm-12-rank-0.log: llmstack: rank 1 died"
    RunFolder(run).finish(4)
    assert status_of(run).error is None


def test_all_runs_below_a_folder_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "b", finished=True)
    make_run(tmp_path / "a")
    (tmp_path / "no run").mkdir()
    output = tmp_path / "status.json"
    assert main(["status", "--all", "--root", str(tmp_path), "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"{tmp_path}/a: stopped (the same command continues it)",
        f"{tmp_path}/b: finished",
    ]
    assert [one["state"] for one in json.loads(output.read_text())] == ["stopped", "finished"]


@pytest.mark.parametrize("arguments", [[], ["--all", "x"], ["nowhere"], ["--all", "--root", "nowhere"], ["--best"]])
def test_status_of_nothing_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


class TestSweeps:
    def points(self, folder: Path, text: str) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "sweep.yaml").write_text(text)
        return folder / "sweep.yaml"

    def test_the_published_grid_has_48_points(self) -> None:
        points = read_sweep("sweep/bhyt_grid.yaml")
        assert len(points) == len({tuple(point.arguments) for point in points}) == 48
        assert points[0].arguments[:4] == ["--model.optimizer.lr", "5e-4", "--model.optimizer.weight_decay", "0.1"]
        assert [point.name for point in points[:2]] == ["0000", "0001"]

    def test_the_best_is_the_finished_one_of_lowest_last_validation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        points = read_sweep(str(self.points(tmp_path, "lr: ['--a 1', '--a 2', '--a 3', '--a 4']\n")))
        write_points(tmp_path, points)
        assert points_in(tmp_path) == points
        with pytest.raises(UserError, match="none of its 4 points has finished"):
            best_run(tmp_path)
        for name, loss, finished in (("0000", 3.0, True), ("0001", 1.0, False), ("0002", 2.0, True)):
            make_run(tmp_path / name, val_loss=loss, finished=finished)
        make_run(tmp_path / "0003", val_loss=float("nan"), finished=True)
        assert main(["status", str(tmp_path), "--best"]) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "0002")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "no sweep"),
            ("lr: 3\n", "lr must be a list"),
            ("lr: [1, 2]\n", "lr must be a list"),
            ("lr: []\n", "lr must be a list"),
            ("""lr: ["--a 'b"]\n""", "cannot be read"),
            ("lr: [\n", "not readable"),
            ("[" * 3000, "not readable"),
            ("".join(f"a{n}: ['x', 'y']\n" for n in range(14)), "16,384 points"),
        ],
    )
    def test_a_file_that_is_no_sweep_is_refused(self, text: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=words):
            read_sweep(str(self.points(tmp_path, text)))


def test_cancel_saves_a_run_without_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    slow = callbacks(tmp_path, Orders={"folder": str(tmp_path), "pace": 0.05})
    arguments = [*LAYOUTS["single"], "--trainer.max_steps", "4000", "--run.validate_every", "null", *slow]
    with Job(run, *arguments, PATH="/usr/bin:/bin") as job:
        job.wait_until_at(3)
        assert status_of(run).state == "running"
        assert main(["cancel", str(run)]) == 0
        assert job.end(60) == 143
    step = newest(run).step
    assert step == rows_of(run)[-1]["step"]
    assert f"has ended; saved at step {step}" in capsys.readouterr().out
    assert main(["cancel", str(run)]) == 2
    assert "nobody works on this run" in capsys.readouterr().err


def test_looking_at_a_lock_does_not_take_it(tmp_path: Path) -> None:
    """A run that starts while someone asks where it stands must not be refused its folder."""
    run = make_run(tmp_path / "run")
    (run / ".lock").touch()
    look = "\n".join(
        [
            "import sys, pathlib",
            "from llmstack.checkpoint.lock import is_locked",
            "while True: is_locked(pathlib.Path(sys.argv[1]))",
        ]
    )
    process = subprocess.Popen([sys.executable, "-c", look, str(run)])
    try:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            RunFolder.open(run, {"trainer": {"max_steps": 10}}).close()
    finally:
        process.kill()
        process.wait()
