"""Which room may load what: the light ones run on a bare GPU machine."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "datasets",
    "transformers",
    "lm_eval",
    "torchmetrics",
    "pyarrow",
)

NEEDED_BY_TORCH = ("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy")
ALLOWED = ("torch", "torchgen", "functorch", "typing_extensions", *NEEDED_BY_TORCH, "safetensors", "yaml", "_yaml")

HIDING = """
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

@staticmethod
def hide(name, path=None, target=None):
    spec = find_spec(name, path, target)
    installed = spec is not None and "site-packages" in str(spec.origin or spec.submodule_search_locations)
    return None if installed and name.partition(".")[0] not in {allowed} else spec

PathFinder.find_spec = hide
"""

BARE = """
import torch
from llmstack.checkpoint import load_model, write_checkpoint
from llmstack.inference import Generator, Sampling
from llmstack.model import Llama, ModelConfig
from llmstack.training.step import micro_batch_loss

config = ModelConfig.preset("tiny", vocab_size=64, norm={"method": "bhyt"})
model = Llama(config)
ids = torch.arange(16).view(2, 8)
micro_batch_loss(model, {"input_ids": ids, "labels": ids, "valid_tokens": 16})[0].backward()
path = sys.argv[1] + "/step-00000001"
write_checkpoint(path, step=1, config=config.to_dict(), weights=model.state_dict())
loaded = load_model(path)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
print(list(Generator(loaded, max_length=16).stream([1, 2], 4, Sampling())))
"""


def hiding_all_but_torch(code: str) -> str:
    """``code``, which finds installed packages only as far as torch, safetensors and PyYAML need them."""
    return HIDING.format(allowed=ALLOWED) + code


LIGHT = ["model", "checkpoint", "inference", "training.step", "training.optim", "training.diagnostics", "accounting"]


@pytest.mark.parametrize("room", [*LIGHT, "bench.norm", "cluster.submission", "cluster.status"])
def test_light_rooms_load_nothing_heavy(room: str) -> None:
    code = f"import sys, llmstack.{room}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & set(HEAVY)


def test_help_loads_no_torch() -> None:
    code = "import sys; from llmstack.cli.main import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in loaded


def test_they_work_with_torch_safetensors_and_pyyaml_alone(tmp_path: Path) -> None:
    """Every other package is hidden: build, train a step, save, load, generate."""
    done = subprocess.run(
        [sys.executable, "-c", hiding_all_but_torch(BARE), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(eval(done.stdout)) == 4
