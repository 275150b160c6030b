"""The disk that checkpoints need: as much as they take, and refused before a run where it is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import RunFolder, checkpoint_bytes, require_disk_space, write_checkpoint
from llmstack.errors import UserError

SIZES = {"hidden_size": 256, "vocab_size": 4096, "num_layers": 12, "intermediate_size": 512}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("sizes", [{}, SIZES])
@pytest.mark.parametrize("moments", [0, 1, 2])
def test_the_size_is_that_of_a_written_checkpoint(build, tmp_path, sizes, moments):
    model = build("bhyt", **sizes)
    optimizer = {
        f"{name}/{state}": torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
        for state in ("exp_avg", "exp_avg_sq")[:moments]
    }
    if moments:
        optimizer |= {f"{name}/step": torch.tensor(1.0) for name, _ in model.named_parameters()}
    state = {"data": {"fingerprint": "0" * 64, "block_size": 1024}}
    folder = write_checkpoint(
        tmp_path / "step-00000001",
        step=1,
        config=model.config.to_dict(),
        weights=model.state_dict(),
        optimizer=optimizer if moments else None,
        state=state,
    )
    written = size_of(folder)
    expected = checkpoint_bytes({name: tensor.shape for name, tensor in model.state_dict().items()}, moments)
    assert written <= expected <= written * 1.01 + 120_000


def test_an_absent_run_folder_is_measured_where_it_will_be(tmp_path):
    run = RunFolder(tmp_path / "runs" / "a")
    free = shutil.disk_usage(tmp_path).free
    require_disk_space(run, free // 4, 3)
    with pytest.raises(UserError) as error:
        require_disk_space(run, free, 3)
    message = str(error.value)
    assert f"3 checkpoints of {free / 1e9:.1f} GB take {3 * free / 1e9:.1f} GB" in message
    for part in (str(run.path), "the disk has room for", "run.keep_checkpoints", "run.keep_every", "run.dir"):
        assert part in message
    assert "\n" not in message
    assert not (tmp_path / "runs").exists()


def test_its_own_checkpoints_count_as_room(small_disk):
    """Of 4 MB of disk two checkpoints of 1 MB lie there: 3.5 MB fit for this run, and not for another."""
    run = RunFolder(small_disk / "a")
    for step in (25, 50):
        weights = {"w": torch.zeros(250_000)}
        write_checkpoint(run.checkpoint_path(step), step=step, config={}, weights=weights)
    require_disk_space(run, 1_750_000, 2)
    with pytest.raises(UserError, match=r"has room for 2\.\d MB"):
        require_disk_space(RunFolder(small_disk / "b"), 1_750_000, 2)
    with pytest.raises(UserError, match=r"take 4\.5 MB, but the disk has room for 4\.\d MB"):
        require_disk_space(run, 2_250_000, 2)
