"""A run that is killed without warning ends like the one that was not."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmstack.checkpoint import MetricsFile
from tests.e2e.conftest import SMALL, Command, environment

KILLS = 3


LIVES = {
    "tapernorm_all": ["--model.config.norm.taper_start", "0.4", "--model.config.norm.taper_end", "0.8"],
    "fake_ln": [
        word
        for site, start in (("mlp", 20), ("qk", 40), ("v", 60), ("final", 80))
        for word in (f"--model.config.norm.start_{site}", str(start))
    ],
}
"""What happens to the norms within a hundred steps: measuring first, removal then."""


def arguments(run: Path, steps: int) -> list[str]:
    rhythm = ["--run.checkpoint_every", "25", "--run.validate_every", "60"]
    slow_enough_to_aim = ["--data.micro_batch_size", "16"]
    return ["fit", *SMALL, *rhythm, *slow_enough_to_aim, "--trainer.max_steps", str(steps), "--run.dir", str(run)]


def rows_of(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.csv"
    return MetricsFile(path).read() if path.is_file() and path.stat().st_size else []


def kill_at(step: int, run: Path, arguments: Sequence[str]) -> None:
    """Start the run and SIGKILL it once it has logged ``step``, which lies past all that earlier starts logged."""
    command = [sys.executable, "-m", "llmstack", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment())
    deadline = time.monotonic() + 240
    try:
        while not (rows := rows_of(run)) or rows[-1]["step"] < step:
            assert time.monotonic() < deadline, "the run did not reach the step in time"
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_three_kills_change_nothing(llmstack: Command, tmp_path: Path) -> None:
    """Killed at three random steps: the same losses to the last bit, each step once, validations too."""
    steps = 200
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished = llmstack(*arguments(whole, steps))
    assert finished.returncode == 0, finished.stderr
    moments = sorted(random.sample(range(5, 130), KILLS))
    for moment in moments:
        kill_at(moment, killed, arguments(killed, steps))
        last = rows_of(killed)[-1]["step"]
        saved = sorted(int(path.name[5:]) for path in (killed / "checkpoints").glob("step-*")) or [0]
        # Written beside the training, but never more than one at a time.
        assert last - saved[-1] <= 51, (moments, last, saved)
    finished = llmstack(*arguments(killed, steps))
    assert finished.returncode == 0, (moments, finished.stderr)
    columns = ("step", "tokens_seen", "loss", "learning_rate", "grad_norm", "val_loss", "val_tokens")
    table = [[[row[name] for name in columns] for row in rows_of(run)] for run in (whole, killed)]
    assert table[0] == table[1], moments
    assert [row[0] for row in table[1]] == list(range(1, steps + 1))


@pytest.mark.parametrize("norm", ["tapernorm_all", pytest.param("fake_ln", marks=pytest.mark.full)])
def test_norms_killed_while_they_are_measured_and_removed(llmstack: Command, tmp_path: Path, norm: str) -> None:
    """Killed in the midst of each: the same losses, weights, factors and averages to the last bit."""
    steps = 100
    life = ["-c", f"norm/{norm}.yaml", *LIVES[norm], "--run.checkpoint_every", "10"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished = llmstack(*arguments(whole, steps), *life)
    assert finished.returncode == 0, finished.stderr
    for moment in (random.randint(12, 38), random.randint(52, 78)):
        kill_at(moment, killed, [*arguments(killed, steps), *life])
    finished = llmstack(*arguments(killed, steps), *life)
    assert finished.returncode == 0, finished.stderr
    table = [[(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(run)] for run in (whole, killed)]
    assert table[0] == table[1]
    for name in ("model.safetensors", "optimizer.safetensors"):
        ends = [next((run / "checkpoints" / f"step-{steps:08d}").rglob(name)) for run in (whole, killed)]
        assert ends[0].read_bytes() == ends[1].read_bytes(), name


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_step_and_says_so(llmstack: Command, tmp_path: Path, number: signal.Signals) -> None:
    """Exit status 128 + signal, a checkpoint of the very step, and the rest of the run is as if nothing had been."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert llmstack(*arguments(whole, 150)).returncode == 0
    command = [sys.executable, "-m", "llmstack", *arguments(stopped, 150)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    while not (rows := rows_of(stopped)) or rows[-1]["step"] < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    last = rows_of(stopped)[-1]["step"]
    assert last < 150
    assert f"saved at step {last} of 150" in errors.splitlines()[-1]
    assert (stopped / "checkpoints" / f"step-{last:08d}").is_dir()
    assert llmstack(*arguments(stopped, 150)).returncode == 0
    losses = [[(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(run)] for run in (whole, stopped)]
    assert losses[0] == losses[1]


def test_two_at_once_on_one_folder(tmp_path: Path, llmstack: Command) -> None:
    """The second is refused at once, by name of the process; the first goes on."""
    run = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-m", "llmstack", *arguments(run, 400)], stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        deadline = time.monotonic() + 120
        while not rows_of(run):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        second = llmstack(*arguments(run, 400))
        assert second.returncode == 2
        assert str(first.pid) in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("kept", ["cut", pytest.param("whole", marks=pytest.mark.full)])
def test_everything_works_on_a_finished_run(llmstack: Command, tmp_path: Path, kept: str) -> None:
    """validate, inspect, generate and perplexity read what fit wrote, also when the newest checkpoint is broken."""
    run = tmp_path / "run"
    assert llmstack(*arguments(run, 50)).returncode == 0
    if kept == "cut":
        newest = run / "checkpoints" / "step-00000050" / "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:1000])
    validated = llmstack("validate", "-c", str(run / "config.yaml"), "--ckpt_path", str(run))
    assert validated.returncode == 0, validated.stderr
    assert ("step-00000050" in validated.stderr) == (kept == "cut")
    generated = llmstack("generate", str(run), "--prompt", "The", "--max-new-tokens", "5")
    assert generated.returncode == 0, generated.stderr
    (tmp_path / "text.txt").write_text("A short text to be measured, twice over.\n" * 3)
    measured = llmstack("perplexity", str(run), "--dataset", str(tmp_path / "text.txt"))
    assert measured.returncode == 0, measured.stderr
    inspected = llmstack("inspect", str(run))
    assert inspected.returncode == 0, inspected.stderr
    assert "bhyt" in inspected.stdout.lower()


def test_a_lost_run_folder_comes_back_from_its_mirror(llmstack: Command, tmp_path: Path) -> None:
    """Killed, its disk gone: the same command goes on from the store, and ends like the run that was not killed."""
    steps, url = 60, f"file://{tmp_path}/store/run"
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    assert llmstack(*arguments(whole, steps)).returncode == 0
    mirrored = [*arguments(lost, steps), "--run.mirror", url]
    kill_at(40, lost, mirrored)
    shutil.rmtree(lost)
    finished = llmstack(*mirrored)
    assert finished.returncode == 0, finished.stderr
    assert "from step 25 of 60" in finished.stderr
    columns = ("step", "tokens_seen", "loss", "learning_rate", "grad_norm", "val_loss")
    table = [[[row[name] for name in columns] for row in rows_of(run)] for run in (whole, lost)]
    assert table[0] == table[1]
    shutil.rmtree(lost)
    again = llmstack(*mirrored)
    assert (again.returncode, lost.exists()) == (0, False)
    assert "has the finished run: nothing to do" in again.stderr
    generated = llmstack("generate", url, "--prompt", "The", "--max-new-tokens", "4")
    assert generated.returncode == 0, generated.stderr
