"""Traces of chosen steps, by one process and by two ranks that really exchange gradients."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack.training.callbacks.profiling import busy_seconds

TRAIN = """
import json, sys, time
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader
from llmstack.training.callbacks.profiling import Profiling

class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 5:
            time.sleep(1)
        with torch.profiler.record_function(f"batch {batch_idx}"):
            return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

run, devices = Path(sys.argv[1]), int(sys.argv[2])
profiling = Profiling(run, [2, 4], memory=True)
trainer = L.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=5, max_epochs=-1,
    accumulate_grad_batches=3, callbacks=[profiling], logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)
trainer.fit(Tiny(), DataLoader(torch.randn(40, 8), batch_size=2))
(run / f"seconds-{trainer.global_rank}.json").write_text(json.dumps(profiling.communication_seconds))
"""


def train(folder: Path, devices: int) -> str:
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, str(script), str(folder), str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stderr


def trace(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def seconds(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"seconds-{rank}.json").read_text())


def test_exactly_the_chosen_steps_are_traced_whole(tmp_path: Path) -> None:
    """Step 2 of three micro-batches each is made of batches 3 to 5, step 4 of 9 to 11."""
    errors = train(tmp_path, 1)
    folder = tmp_path / "logs" / "profile"
    names = {f"step-0000000{step}-rank0.{kind}" for step in (2, 4) for kind in ("json.gz", "txt")}
    assert {path.name for path in folder.iterdir()} == names
    for step in (2, 4):
        found = trace(folder / f"step-0000000{step}-rank0.json.gz")
        batches = {name for name in found if name.startswith("batch ")}
        assert batches == {f"batch {3 * (step - 1) + number}" for number in range(3)}
        assert "aten::addmm" in found
        assert any("SGD.step" in name for name in found)
        assert "aten::addmm" in (folder / f"step-0000000{step}-rank0.txt").read_text()
    assert seconds(tmp_path, 0) == {"2": 0.0, "4": 0.0}
    assert "no memory snapshot" in errors


def test_a_rank_that_waits_for_another_spends_the_time_communicating(tmp_path: Path) -> None:
    """Rank 1 comes a second late to the exchange of step 2."""
    train(tmp_path, 2)
    spent = [seconds(tmp_path, rank) for rank in range(2)]
    for rank in range(2):
        for step in ("2", "4"):
            path = tmp_path / "logs" / "profile" / f"step-0000000{step}-rank{rank}"
            assert any(name.startswith("gloo:all_reduce") for name in trace(path.with_suffix(".json.gz")))
            whole = float(path.with_suffix(".txt").read_text().split(": ")[1].split(" s")[0])
            assert 0 < spent[rank][step] <= whole
    assert spent[0]["2"] > 0.8
    assert spent[1]["2"] < 0.5


def test_overlapping_collectives_are_counted_once() -> None:
    assert busy_seconds([(5e6, 6e6), (0, 2e6), (1e6, 3e6), (1e6, 1.5e6)]) == pytest.approx(4)
