"""One checkpoint written by two processes: whole for every reader, or absent; and no process waits for ever."""

from __future__ import annotations

import datetime
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmstack.checkpoint import RunFolder, load_model, read_checkpoint, write_checkpoint
from llmstack.errors import UserError

SECONDS = 60
"""Longest time that two processes may take."""


class TwoRanks:
    """This process as one of two that talk over gloo."""

    world_size = 2

    def __init__(self, rank: int, meeting: Path) -> None:
        self.rank = rank
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=SECONDS / 2),
        )

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found


Together = Callable[[Callable[[TwoRanks], None]], list[int]]


@pytest.fixture
def together(tmp_path_factory: pytest.TempPathFactory, fork: Callable[[Callable[[], None]], int]) -> Together:
    """Run a function on two ranks; their exit statuses, as of ``waitpid``."""

    def run(work: Callable[[TwoRanks], None]) -> list[int]:
        meeting = tmp_path_factory.mktemp("meeting") / "file"
        processes = [fork(lambda rank=rank: work(TwoRanks(rank, meeting))) for rank in range(2)]
        deadline = time.monotonic() + SECONDS
        statuses: dict[int, int] = {}
        while len(statuses) < 2:
            assert time.monotonic() < deadline, "a rank hangs"
            for process in processes:
                if process not in statuses:
                    ended, status = os.waitpid(process, os.WNOHANG)
                    statuses |= {process: status} if ended else {}
            time.sleep(0.01)
        return [statuses[process] for process in processes]

    return run


def share(names: list[str], rank: int) -> list[str]:
    """Every other name."""
    return names[rank::2]


def write_together(ranks: TwoRanks, folder: Path, elements: int = 1000, step: int = 50, **more: Any) -> Path:
    """A weight and a moment of each rank's own."""
    tensor = torch.full((elements,), float(step + ranks.rank))
    return write_checkpoint(
        folder,
        step=step,
        config={},
        weights={f"w{ranks.rank}": tensor},
        optimizer={f"w{ranks.rank}/exp_avg": tensor / 2},
        ranks=ranks,
        **more,
    )


def write_alone(folder: Path, step: int = 25) -> Path:
    return write_checkpoint(folder, step=step, config={}, weights={"w": torch.full((8,), float(step))})


@pytest.mark.parametrize("tie", [True, False])
def test_the_shares_of_two_ranks_are_one_checkpoint(build, tmp_path, together, tie):
    model = build("bhyt", tie_word_embeddings=tie)
    weights = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach()}
    optimizer = {f"{name}/exp_avg": torch.randn_like(p) for name, p in model.named_parameters()}
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    folder = tmp_path / "run" / "step-00000050"

    def write(ranks: TwoRanks) -> None:
        returned = write_checkpoint(
            folder,
            step=50,
            config=model.config.to_dict(),
            weights={name: weights[name] for name in share(list(weights), ranks.rank)},
            optimizer={name: optimizer[name] for name in share(list(optimizer), ranks.rank)},
            state={"tokens_seen": 3},
            tokenizer=tokenizer,
            ranks=ranks,
        )
        assert returned == folder
        assert read_checkpoint(folder).step == 50

    assert together(write) == [0, 0]
    parts = ("00001-of-00002.safetensors", "00002-of-00002.safetensors")
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint.json",
        "tokenizer",
        *(f"{role}-{part}" for role in ("model", "optimizer") for part in parts),
    }
    found = read_checkpoint(folder)
    assert found.state == {"tokens_seen": 3}
    assert found.tokenizer_path == folder / "tokenizer"
    assert set(found.weights()) == set(model.state_dict())
    assert set(found.optimizer()) == set(optimizer)
    assert all(torch.equal(found.optimizer()[name], tensor) for name, tensor in optimizer.items())
    loaded = load_model(folder)
    ids = torch.arange(12).reshape(2, 6)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(loaded(ids), model(ids))
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tie
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_rank_without_tensors_of_a_kind_writes_no_file_of_it(tmp_path, together):
    folder = tmp_path / "step-00000050"

    def write(ranks: TwoRanks) -> None:
        weights = {"w": torch.ones(3)} if ranks.rank == 1 else {}
        optimizer = {"w/exp_avg": torch.ones(3)} if ranks.rank == 0 else None
        write_checkpoint(folder, step=50, config={}, weights=weights, optimizer=optimizer, ranks=ranks)

    assert together(write) == [0, 0]
    names = {"checkpoint.json", "model-00002-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert set(read_checkpoint(folder).weights()) == {"w"}


def fails_with(outcome: Path, ranks: TwoRanks, work: Callable[[], object]) -> None:
    """Note the UserError that ``work`` must raise."""
    with pytest.raises(UserError) as error:
        work()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (outcome / str(ranks.rank)).write_text(str(error.value))


def messages(outcome: Path) -> list[str]:
    return [(outcome / str(rank)).read_text() for rank in range(2)]


@pytest.fixture
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outcome")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_for_one_rank_fails_both_and_leaves_the_old_one(small_disk, together, outcome, failing):
    run = small_disk / "checkpoints"
    write_alone(run / "step-00000025")

    def write(ranks: TwoRanks) -> None:
        elements = 2_000_000 if ranks.rank == failing else 10
        fails_with(outcome, ranks, lambda: write_together(ranks, run / "step-00000050", elements))

    assert together(write) == [0, 0]
    first, second = messages(outcome)
    assert first == second
    assert first.startswith(f"cannot write {run / 'step-00000050'}: ")
    assert "No space left on device" in first
    # The other's small file may be the first to find the disk full.
    assert first.endswith(("(rank 0)", "(rank 1)"))
    assert "\n" not in first
    assert [path.name for path in run.iterdir()] == ["step-00000025"]
    assert read_checkpoint(run / "step-00000025").step == 25


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("failing", "limit"), [(0, 0), (0, 5000), (1, 5000)])
def test_a_rank_that_cannot_write_fails_both(tmp_path, together, outcome, failing, limit, replace):
    """It fails in its share or, having none, in the manifest."""
    run = tmp_path / "checkpoints"
    write_alone(run / "step-00000025")
    if replace:
        write_alone(run / "step-00000050", 50)
    before = {path: path.stat().st_ino for path in run.rglob("*")}

    def write(ranks: TwoRanks) -> None:
        if ranks.rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        weights = {f"w{ranks.rank}": torch.ones(10_000)} if limit or ranks.rank != failing else {}
        folder = run / "step-00000050"
        fails_with(outcome, ranks, lambda: write_checkpoint(folder, step=50, config={}, weights=weights, ranks=ranks))

    assert together(write) == [0, 0]
    first, second = messages(outcome)
    assert first == second
    assert first.endswith(f"(rank {failing})")
    assert {path: path.stat().st_ino for path in run.rglob("*")} == before


def test_a_rank_that_does_not_see_the_folder_is_told_so(tmp_path, together, outcome):
    def write(ranks: TwoRanks) -> None:
        folder = tmp_path / f"disk-of-{ranks.rank}" / "step-00000050"
        folder.parent.mkdir()
        fails_with(outcome, ranks, lambda: write_together(ranks, folder))

    assert together(write) == [0, 0]
    first, second = messages(outcome)
    assert first == second
    assert "disk-of-1" in first
    assert "the run folder must be shared by all (rank 1)" in first
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_fault_of_one_rank_is_its_own_and_the_other_does_not_wait(tmp_path, together, outcome):
    def write(ranks: TwoRanks) -> None:
        weights: dict[str, Any] = {"w": torch.ones(3)} if ranks.rank == 0 else {"v": None}

        def work() -> None:
            write_checkpoint(tmp_path / "step-00000050", step=50, config={}, weights=weights, ranks=ranks)

        if ranks.rank == 0:
            fails_with(outcome, ranks, work)
        else:
            with pytest.raises(AttributeError):
                work()

    assert together(write) == [0, 0]
    assert (outcome / "0").read_text().startswith("AttributeError: ")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_both_ranks_give_is_refused(tmp_path, together):
    """Which of the two a reader would get is nobody's guess."""

    def write(ranks: TwoRanks) -> None:
        with pytest.raises(AssertionError if ranks.rank == 0 else UserError, match="given by two ranks: w"):
            write_checkpoint(tmp_path / "step-00000050", step=50, config={}, weights={"w": torch.ones(3)}, ranks=ranks)

    assert together(write) == [0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_while_it_writes_ends_the_other_and_the_next_save_cleans_up(tmp_path, together, dying):
    write_alone(tmp_path / "step-00000025")

    def write(ranks: TwoRanks) -> None:
        if ranks.rank == dying:
            import llmstack.checkpoint.format as checkpoint_format

            checkpoint_format.serialize_file = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
        write_together(ranks, tmp_path / "step-00000050")

    statuses = together(write)
    assert os.WTERMSIG(statuses[dying]) == signal.SIGKILL
    assert os.WEXITSTATUS(statuses[1 - dying]) == 1
    assert not (tmp_path / "step-00000050").exists()
    write_alone(tmp_path / "step-00000075", 75)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000025", "step-00000075"}
    assert read_checkpoint(tmp_path / "step-00000025").step == 25


def test_each_file_lost_or_cut_gives_the_checkpoint_before_and_names_the_file(tmp_path, together, caplog):
    run = RunFolder.open(tmp_path / "run", {})
    write_alone(run.checkpoint_path(25))
    newest = run.checkpoint_path(50)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": {}}')
    assert together(lambda ranks: write_together(ranks, newest, tokenizer=tokenizer) and None) == [0, 0]
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) == 6
    assert len(json.loads((newest / "checkpoint.json").read_text())["files"]) == 5
    for file in files:
        content = file.read_bytes()
        for damaged in (None, b"", content[: len(content) // 2], content[:-2]):
            file.unlink(missing_ok=True)
            if damaged is not None:
                file.write_bytes(damaged)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                found = run.newest_checkpoint()
            assert found is not None
            assert found.step == 25
            assert torch.equal(found.weights()["w"], torch.full((8,), 25.0))
            assert str(file) in caplog.text
        file.write_bytes(content)
    caplog.clear()
    found = run.newest_checkpoint()
    assert found is not None
    assert found.step == 50
    assert torch.equal(found.weights()["w1"], torch.full((1000,), 51.0))
    assert caplog.text == ""
