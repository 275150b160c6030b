"""``llmstack perplexity`` on two ranks: the numbers of one, said once, by one; and no rank waits for ever."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from llmstack.cli.main import main
from llmstack.cli.ranks import Place, place
from tests.e2e.command import run_command

SECONDS = 60


class Ended(NamedTuple):
    """A rank that has."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def ckpt(shared: Path) -> str:
    return str(shared / "checkpoints/stories260K/hf")


def on_two_ranks(arguments: Sequence[str], folders: Sequence[Path]) -> list[Ended]:
    """A command as torchrun starts it, each rank in its own folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["llmstack.checkpoint", "llmstack.evaluation.perplexity"])
    processes, outputs = [], []
    for rank, folder in enumerate(folders):
        own = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        variables = {**os.environ, **own, "RANK": str(rank)}
        outputs.append([folder / f".{name}-{rank}" for name in ("stdout", "stderr")])
        processes.append(forked.Process(target=run_command, args=(arguments, folder, outputs[-1], variables)))
        processes[-1].start()
    for process in processes:
        process.join(SECONDS)
        if process.exitcode is None:
            for one in processes:
                one.kill()
            pytest.fail(f"a rank still runs after {SECONDS} s")
    texts = [[file.read_text() for file in files] for files in outputs]
    return [Ended(process.exitcode or 0, *both) for process, both in zip(processes, texts, strict=True)]


def test_torchrun_gives_the_numbers_of_one_process(ckpt: str, shared: Path, tmp_path: Path):
    """Documents of many lengths, in windows whose number is odd."""
    with open(shared / "c4/c4_en_valid_1k.jsonl", encoding="utf-8") as lines:
        rows = list(islice(lines, 3))
    file, alone, both = tmp_path / "c4.jsonl", tmp_path / "alone.json", tmp_path / "both.json"
    file.write_text("".join(rows), encoding="utf-8")
    arguments = ["perplexity", ckpt, "--dataset", str(file), "--per-document", "--window", "200", "--stride", "150"]
    assert main([*arguments, "--output", str(alone)]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*torchrun, "llmstack", *arguments, "--batch-tokens", "600", "--output", str(both)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    expected, found = (json.loads(output.read_text()) for output in (alone, both))
    for name in ("nats_per_token", "word_perplexity", "bits_per_byte"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-5 if name != "word_perplexity" else 1e-4)
    assert found.pop("perplexity") == pytest.approx(expected.pop("perplexity"), rel=1e-4)
    assert found == expected
    assert done.stdout.count("nats per token") == done.stdout.count("word level") == 1


def test_a_rank_without_a_window_waits_for_the_other(ckpt: str, tmp_path: Path):
    (tmp_path / "a.txt").write_text("Once upon a time there was a cat.", encoding="utf-8")
    arguments = ["perplexity", ckpt, "--dataset", "a.txt", "--output"]
    first, second = on_two_ranks([*arguments, "both.json"], [tmp_path, tmp_path])
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "10 tokens" in first.out
    assert second.out == ""
    assert main(["perplexity", ckpt, "--dataset", str(tmp_path / "a.txt"), "--output", str(tmp_path / "one.json")]) == 0
    both, one = (json.loads((tmp_path / name).read_text()) for name in ("both.json", "one.json"))
    assert both["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "llmstack: rank 1: no file matches 'a.txt'"),
        (["--window", "513"], "llmstack: perplexity: the window is 513 tokens"),
    ],
    ids=["of one rank", "of both"],
)
def test_an_error_ends_all_ranks_and_is_said_once(ckpt: str, tmp_path: Path, options: list[str], line: str):
    """The text lies where the first rank looks for it, and there alone."""
    for name in ("node0", "node1"):
        (tmp_path / name).mkdir()
    (tmp_path / "node0/a.txt").write_text("Once upon a time there was a cat.", encoding="utf-8")
    folders = [tmp_path / "node0", tmp_path / ("node0" if options else "node1")]
    ended = on_two_ranks(["perplexity", ckpt, "--dataset", "a.txt", *options], folders)
    assert [one.status for one in ended] == [2, 2]
    assert [one.out for one in ended] == ["", ""]
    (said,) = [text for one in ended for text in one.err.splitlines()]
    assert said.startswith(line)


class TestPlace:
    """From the environment alone."""

    @pytest.fixture(autouse=True)
    def no_other_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                monkeypatch.delenv(name)

    @pytest.mark.parametrize(
        "variables",
        [
            {},
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        ],
        ids=["a shell", "the batch script of a job", "a step of one task", "torchrun of one rank"],
    )
    def test_alone(self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert place() is None

    def test_a_task_of_a_step(self, monkeypatch: pytest.MonkeyPatch):
        step = {"STEP_NUM_TASKS": "16", "PROCID": "9", "LOCALID": "1", "STEP_NODELIST": "gpu[07-08]"}
        for name, value in step.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("MASTER_PORT", "4567")
        assert place() == Place("tcp://gpu07:4567", rank=9, world_size=16, local_rank=1)
