"""``slurm/evaluate.sbatch`` on a real Slurm: two tasks on two nodes share the questions."""

import json
import os
import sys
from pathlib import Path

from llmstack.cli.main import main
from tests.slurm.conftest import Cluster
from tests.training.conftest import TINY

ROOT = Path(__file__).parents[2]


def test_two_nodes_give_what_one_process_gives(cluster: Cluster, tmp_path: Path) -> None:
    run, answers = tmp_path / "run", tmp_path / "answers"
    assert main(["fit", *TINY, "--model.compile", "false", "--trainer.max_steps", "1", "--run.dir", str(run)]) == 0
    asked = ["evaluate", str(run), "--tasks", "python_reference", "--limit", "5"]
    assert main([*asked, "--output", str(tmp_path / "alone.json")]) == 0
    environ = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "LLMSTACK_ANSWERS": str(answers)}
    environ["LLMSTACK_CACHE"] = os.environ["LLMSTACK_CACHE"]
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in environ.items())])
    shape = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--mem=2G", "--time=10"]
    script = [str(ROOT / "slurm/evaluate.sbatch"), *asked[1:], "--output", str(tmp_path / "shared.json")]
    told = tmp_path / "told.txt"
    job = cluster.run("sbatch", "--parsable", f"--export={exported}", f"--output={told}", *shape, *script).strip()
    done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    cluster.wait_for(lambda: cluster.state(job) in done, 240, lambda: told.read_text() if told.exists() else "")
    assert cluster.state(job) == "COMPLETED", told.read_text()
    results = [json.loads((tmp_path / f"{name}.json").read_text())["tasks"] for name in ("alone", "shared")]
    assert results[0] == results[1]
    # Each of the two has computed some, and the table was printed once.
    lines = [path.read_text().split() for path in sorted(answers.glob("*.jsonl"))]
    assert len(lines) == 2
    assert all(lines)
    assert told.read_text().count("sample ±:") == 1
