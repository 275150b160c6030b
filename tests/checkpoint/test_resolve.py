"""What a CKPT argument means; and the loaded model is the saved one."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import RunFolder, load_model, resolve, tokenizer_folder, write_checkpoint
from llmstack.errors import UserError
from llmstack.model import Llama, RopeScaling

IDS = torch.arange(12).reshape(2, 6)
VARIANTS = {
    "rmsnorm": {"rope_scaling": RopeScaling(original_max_position_embeddings=16)},
    "untied": {"tie_word_embeddings": False, "lm_head_bias": True, "positions": "learned"},
    "layernorm": {"norm": {"method": "layernorm"}, "attention_bias": True},
    "bhyt": {"norm": {"method": "bhyt", "kappa": 7.0}, "residual_dropout": 0.3, "embedding_dropout": 0.1},
    "fixed": {"norm": {"method": "bhyt", "trainable_lambda": False}},
    "bhyt_star": {"norm": {"method": "bhyt_star", "lambda_final": 1.0, "mu_term": True}},
}


def save(model: Llama, folder: Path, step: int = 25, tokenizer: Path | None = None) -> Path:
    config = model.config.to_dict()
    return write_checkpoint(folder, step=step, config=config, weights=model.state_dict(), tokenizer=tokenizer)


def all_tensors(model: Llama) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loaded_model_is_the_saved_one(build, tmp_path, variant):
    model = build(**VARIANTS[variant])
    loaded = load_model(save(model, tmp_path / "step-00000025"))
    assert not loaded.training
    assert loaded.config == model.config
    for name, tensor in all_tensors(model).items():
        found = all_tensors(loaded)[name]
        assert found.dtype == tensor.dtype
        assert found.requires_grad == tensor.requires_grad
        assert torch.equal(found, tensor), name
    assert all_tensors(loaded).keys() == all_tensors(model).keys()
    assert torch.equal(loaded(IDS), model(IDS))


@pytest.mark.parametrize("variant", ["rmsnorm", "bhyt", "fixed"])
def test_bf16_is_what_casting_the_model_gives(build, tmp_path, variant):
    model = build(**VARIANTS[variant])
    loaded = load_model(save(model, tmp_path / "step-00000025"), dtype=torch.bfloat16)
    for name, tensor in all_tensors(model.to(torch.bfloat16)).items():
        assert all_tensors(loaded)[name].dtype == tensor.dtype, name
        assert torch.equal(all_tensors(loaded)[name], tensor), name
    assert torch.equal(loaded(IDS), model(IDS))


def test_tied_weights_are_one_parameter(build, tmp_path):
    loaded = load_model(save(build(tie_word_embeddings=True), tmp_path / "step-00000025"))
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    loaded(IDS).sum().backward()
    assert loaded.embed_tokens.weight.grad is not None


def test_a_run_means_its_newest_good_checkpoint(build, tmp_path, caplog):
    run = RunFolder.open(tmp_path / "run", {"seed": 1})
    with pytest.raises(UserError, match="has no checkpoint yet"):
        resolve(run.path)
    first, second = build(), build()
    with torch.no_grad():
        second.norm.weight.mul_(2)
    save(first, run.checkpoint_path(25), 25)
    save(second, run.checkpoint_path(50), 50)
    assert torch.equal(load_model(run.path).norm.weight, second.norm.weight)
    assert resolve(run.checkpoint_path(25)).checkpoint.step == 25
    os.truncate(run.checkpoint_path(50) / "model.safetensors", 1000)
    assert torch.equal(load_model(str(run.path)).norm.weight, first.norm.weight)
    assert "step-00000050/model.safetensors is damaged" in caplog.text
    with pytest.raises(UserError, match="damaged"):
        resolve(run.checkpoint_path(50))


def test_tokenizer_folder(build, tmp_path, shared):
    stories = shared / "checkpoints" / "stories260K" / "hf"
    assert tokenizer_folder(stories) == stories
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.model").write_bytes((stories / "tokenizer.model").read_bytes())
    path = save(build(), tmp_path / "step-00000025", tokenizer=tokenizer)
    assert tokenizer_folder(resolve(path)) == path / "tokenizer"
    assert tokenizer_folder(save(build(), tmp_path / "step-00000050")) is None


def test_weights_that_do_not_fit_the_config_are_named(build, tmp_path):
    model = build()
    config = {**model.config.to_dict(), "num_layers": 1, "attention_bias": True, "vocab_size": 65}
    write_checkpoint(tmp_path / "step-00000001", step=1, config=config, weights=model.state_dict())
    with pytest.raises(UserError) as error:
        load_model(tmp_path / "step-00000001")
    message = str(error.value)
    assert "missing layers.0.attention.q_proj.bias" in message
    assert "not in this model layers.1." in message
    assert "embed_tokens.weight [64, 32] instead of [65, 32]" in message


def test_unknown_option_of_a_newer_model_names_the_checkpoint(build, tmp_path):
    model = build()
    config = {**model.config.to_dict(), "hyper_connections": 4}
    path = write_checkpoint(tmp_path / "step-00000001", step=1, config=config, weights=model.state_dict())
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*hyper_connections"):
        resolve(path)


def test_stories260k_loads_and_agrees_with_transformers(shared):
    transformers = pytest.importorskip("transformers")
    folder = shared / "checkpoints" / "stories260K" / "hf"
    model = load_model(folder)
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(1, 61).reshape(2, 30)
    with torch.no_grad():
        expected = reference(ids).logits
        assert (model(ids) - expected).abs().max() < 1e-4 * expected.std()


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["last.ckpt", "pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_malicious_pickle_is_refused_and_never_run(tmp_path, name):
    target = tmp_path / "owned"
    content = pickle.dumps(Malicious(target))
    (tmp_path / name).write_bytes(content)
    for load in (resolve, load_model, tokenizer_folder):
        with pytest.raises(UserError, match=r"needs unpickling.* refused"):
            load(tmp_path / name)
    assert not target.exists()
    pickle.loads(content)
    assert target.exists()


@pytest.mark.parametrize("mark", ["latest", "zero_to_fp32.py", "mp_rank_00_model_states.pt"])
def test_deepspeed_folders_are_refused(tmp_path, mark):
    (tmp_path / mark).write_bytes(pickle.dumps(Malicious(tmp_path / "owned")))
    with pytest.raises(UserError, match="is a DeepSpeed checkpoint: loading it needs unpickling"):
        resolve(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_other_arguments_get_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        resolve(tmp_path / "absent")
    with pytest.raises(UserError, match="neither a run folder"):
        resolve(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="give the folder"):
        resolve(tmp_path / "a.safetensors")


FRESH = """
import sys
sys.modules["numpy"] = None
import torch
from llmstack.checkpoint import load_model
from llmstack.model import Llama, ModelConfig
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
with torch.device("meta"):
    Llama(ModelConfig(vocab_size=8))  # what torch imports for its first meta tensor is not to be counted
before = peak()
model = load_model(sys.argv[1])
print(sum(p.numel() for p in model.parameters()) * 4 / 2**20, peak() - before)
model(torch.tensor([[1, 2]]))
names = {name.split(".")[0] for name in sys.modules}
foreign = {"lightning", "deepspeed", "datasets", "transformers", "lm_eval", "pyarrow", "tokenizers"}
print(sorted(names & foreign))
"""


def test_a_fresh_process_loads_torch_alone_and_the_weights_once(tmp_path, build):
    """Without numpy; peak memory rises by the model and its largest tensor; no library of another room is there."""
    path = save(
        build(vocab_size=4096, hidden_size=1024, num_layers=6, intermediate_size=1024), tmp_path / "step-00000001"
    )
    largest = 4096 * 1024 * 4 / 2**20
    command = [sys.executable, "-W", "ignore", "-c", FRESH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    figures, foreign = done.stdout.splitlines()
    size, rise = map(float, figures.split())
    assert size > 140
    assert rise < size + 2 * largest + 16
    assert foreign == "[]"
