"""``llmstack import``: every kind of checkpoint as one of ours, bit for bit; and nothing is unpickled without trust."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor

from llmstack.checkpoint import RunFolder, load_model, read_checkpoint, resolve, write_checkpoint
from llmstack.checkpoint.gpt2 import config_from_gpt2
from llmstack.cli.main import main
from llmstack.model import Llama, ModelConfig
from llmstack.tokenizer import load_tokenizer
from llmstack.training.module import LanguageModel
from tests.e2e.conftest import SMALL

IDS = torch.arange(12).reshape(2, 6)
# No size is a multiple of the number of ranks: what DeepSpeed pads must not come along.
SIZES = {"vocab_size": 65, "hidden_size": 35, "num_layers": 2, "head_dim": 6, "intermediate_size": 51}
BHYT = {**SIZES, "norm": {"method": "bhyt", "train_length": 32}}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(config: ModelConfig) -> Llama:
    """A model whose every saved tensor has been moved off its initial value."""
    torch.manual_seed(0)
    model = Llama(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.1 if tensor.is_floating_point() else 7)
    return model


def save(model: Llama, folder: Path, **more: Any) -> Path:
    return write_checkpoint(folder, step=25, config=model.config.to_dict(), weights=model.state_dict(), **more)


@pytest.fixture
def imported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Llama]:
    """``imported(path, *options)`` -> the model of the new checkpoint, which is one fp32 file and no optimiser."""

    def run(path: Path, *options: str) -> Llama:
        out = tmp_path / "imported"
        assert main(["import", str(path), "--out", str(out), *options]) == 0
        captured = capfd.readouterr()
        assert captured.out.startswith(f"{out}: step ")
        assert len(captured.out.splitlines()) == 1
        assert all(line.startswith(("left out: ", "reading ", "writing ")) for line in captured.err.splitlines())
        assert {file.name for file in out.iterdir()} - {"tokenizer"} == {"checkpoint.json", "model.safetensors"}
        found = read_checkpoint(out)
        assert all(t.dtype in (torch.float32, torch.int64) for t in found.weights().values())
        assert not found.optimizer()
        assert [path.name for path in tmp_path.glob(".*")] == []
        return load_model(out)

    return run


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(*arguments)`` -> the one line of a command that exits with 2 and leaves the folder as it was."""

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        capfd.readouterr()
        assert main(list(arguments)) == 2
        captured = capfd.readouterr()
        lines = captured.err.splitlines()
        assert len(lines) == 1, lines
        assert captured.out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def assert_same(found: Llama, expected: Llama) -> None:
    assert found.config == expected.config
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    tied = expected.config.tie_word_embeddings
    assert (found.lm_head.weight is found.embed_tokens.weight) == tied
    assert torch.equal(found(IDS), expected(IDS))


class TwoThreads:
    """Two ranks in one process."""

    world_size = 2
    values: list[Any]
    barrier = threading.Barrier(2)

    def __init__(self, rank: int, values: list[Any]) -> None:
        self.rank, self.values = rank, values

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait(60)
        found = list(self.values)
        self.barrier.wait(60)
        return found


@pytest.mark.parametrize("tie", [True, False])
def test_a_run_of_many_files_becomes_one(tmp_path: Path, imported, tie: bool) -> None:
    model = changed(ModelConfig(**BHYT, tie_word_embeddings=tie))
    weights, values = model.state_dict(), [None, None]
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    run = RunFolder.open(tmp_path / "run", {})
    save(changed(ModelConfig(**SIZES)), run.checkpoint_path(10))

    def write(rank: int) -> None:
        write_checkpoint(
            run.checkpoint_path(25),
            step=25,
            config=model.config.to_dict(),
            weights={name: weights[name] for name in list(weights)[rank::2]},
            optimizer={f"w{rank}/exp_avg": torch.ones(3)},
            state={"tokens_seen": 4096},
            tokenizer=tokenizer,
            ranks=TwoThreads(rank, values),
        )

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(list(run.checkpoint_path(25).glob("model-*-of-00002.safetensors"))) == 2
    assert_same(imported(run.path), model)
    found = read_checkpoint(tmp_path / "imported")
    assert (found.step, found.state) == (25, {"tokens_seen": 4096})
    assert (tmp_path / "imported" / "tokenizer" / "tokenizer.json").read_text() == "{}"


def test_a_hugging_face_folder_and_its_tokenizer(tmp_path: Path, imported, shared: Path) -> None:
    stories = shared / "checkpoints" / "stories260K" / "hf"
    assert_same(imported(stories), load_model(stories))
    tokenizer = resolve(tmp_path / "imported").tokenizer
    assert tokenizer is not None
    assert sorted(path.name for path in tokenizer.iterdir()) == [
        "config.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    assert load_tokenizer(tokenizer).fingerprint == load_tokenizer(stories).fingerprint


GPT2 = {"vocab_size": 50304, "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 2}
"""GPT-2's vocabulary, padded."""


def gpt2_folder(shared: Path, folder: Path) -> Any:
    """A random GPT-2 with the real tokenizer in ``folder``; the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if ".ln_" in name and name.endswith(".weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "tokenizers" / "gpt2" / name, folder)
    return model


def greedy(model: Any, ids: list[int], count: int, vocab_size: int) -> list[int]:
    """The ids that transformers' model adds, each by a full forward pass."""
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1, :vocab_size].argmax())]
    return ids[-count:]


def test_a_gpt2_folder_becomes_a_ckpt_for_every_command(tmp_path: Path, refused, shared: Path, capfd) -> None:
    theirs = gpt2_folder(shared, tmp_path / "gpt2")
    out, text = tmp_path / "imported", tmp_path / "text.txt"
    assert main(["import", str(tmp_path / "gpt2"), "--out", str(out)]) == 0
    captured = capfd.readouterr()
    assert "left out: dropout of attention weights (attn_pdrop 0.1)" in captured.err
    assert captured.out.endswith("with its tokenizer\n")
    assert "exists and is not an empty folder" in refused("import", str(tmp_path / "gpt2"), "--out", str(out))

    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["architecture"]["mlp"] == "gelu_tanh"
    assert main(["generate", str(out), "--prompt", "Hello world", "--max-new-tokens", "20", "--ids"]) == 0
    found = [int(token) for token in capfd.readouterr().out.split(",")]
    assert found == greedy(theirs, [15496, 995], len(found), 50257)
    text.write_text("Hello world")
    assert main(["perplexity", str(out), "--dataset", str(text), "--output", str(tmp_path / "p.json")]) == 0
    result = json.loads((tmp_path / "p.json").read_text())
    with torch.no_grad():
        loss = -theirs(torch.tensor([[15496, 995]])).logits[0, 0].log_softmax(-1)[995].item()
    assert result["nats_per_token"] == pytest.approx(loss, rel=1e-5)


def test_training_goes_on_from_an_imported_gpt2(tmp_path: Path, shared: Path) -> None:
    """With the configuration that the documentation gives, in another size; the weights hardly move at this rate."""
    docs = (Path(__file__).resolve().parents[2] / "docs" / "importing.md").read_text()
    values = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", docs, flags=re.DOTALL)[0])
    assert ModelConfig(**values["model"]["config"]) == config_from_gpt2({"model_type": "gpt2"})

    gpt2_folder(shared, tmp_path / "gpt2")
    assert main(["import", str(tmp_path / "gpt2"), "--out", str(tmp_path / "imported")]) == 0
    before = load_model(tmp_path / "imported")
    values["model"]["init_from"] = str(tmp_path / "imported")
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
    values["model"]["config"].update({name: getattr(before.config, name) for name in sizes})
    (tmp_path / "gpt2.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} green bottles " * 9}) + "\n" for n in range(400))
    )
    arguments = ["-c", str(tmp_path / "gpt2.yaml"), "-c", "data/text.yaml", "-c", "trainer/cpu.yaml"]
    arguments += ["--data.files", str(tmp_path / "corpus.jsonl"), "--data.block_size", "16"]
    arguments += ["--data.tokenizer", str(tmp_path / "imported" / "tokenizer"), "--model.compile", "false"]
    arguments += ["--trainer.max_steps", "1", "--model.optimizer.lr", "1e-30", "--run.dir", str(tmp_path / "run")]
    assert main(["fit", *arguments]) == 0
    assert_same(load_model(tmp_path / "run"), before)


def test_bf16_weights_become_fp32_of_the_same_value(tmp_path: Path, imported) -> None:
    model = changed(ModelConfig(**BHYT)).to(torch.bfloat16)
    found = imported(save(model, tmp_path / "step-00000025"))
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in model.float().state_dict().items())


def test_the_imported_folder_is_a_ckpt_for_every_command(tmp_path: Path, imported, shared: Path, capfd) -> None:
    stories = str(shared / "checkpoints" / "stories260K" / "hf")
    imported(Path(stories))
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. " * 4)
    for command in (
        ["generate", "--prompt", "Once upon", "--max-new-tokens", "20"],
        ["perplexity", "--dataset", str(text)],
    ):
        outputs = []
        for ckpt in (stories, str(tmp_path / "imported")):
            assert main([command[0], ckpt, *command[1:]]) == 0
            outputs.append(capfd.readouterr().out)
        assert outputs[0] == outputs[1]
    assert main(["inspect", str(tmp_path / "imported")]) == 0


def test_an_empty_folder_is_taken_and_anything_else_is_not(tmp_path: Path, imported, refused) -> None:
    model = changed(ModelConfig(**SIZES))
    path = str(save(model, tmp_path / "step-00000025"))
    (tmp_path / "imported").mkdir()
    assert_same(imported(Path(path)), model)
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    for out in ("file", "thesis", "imported", "step-00000025"):
        line = refused("import", path, "--out", str(tmp_path / out))
        assert f"{tmp_path / out} exists and is not an empty folder" in line


def test_what_cannot_be_imported_is_one_line(tmp_path: Path, refused) -> None:
    out = ["--out", str(tmp_path / "new")]
    assert "no such file or folder" in refused("import", str(tmp_path / "absent"), *out)
    assert "--out" in refused("import", str(tmp_path))
    assert "neither a run folder" in refused("import", str(tmp_path), *out, "--trust")
    model = changed(ModelConfig(**SIZES))
    broken = save(model, tmp_path / "step-00000025")
    os.truncate(broken / "model.safetensors", 1000)
    assert "model.safetensors is damaged" in refused("import", str(broken), *out)
    other = {**model.config.to_dict(), "num_layers": 3}
    write_checkpoint(tmp_path / "step-00000050", step=50, config=other, weights=model.state_dict())
    assert "missing layers.2." in refused("import", str(tmp_path / "step-00000050"), *out)


PEAK = """
import sys
from llmstack.checkpoint import import_checkpoint
from llmstack.model import Llama, ModelConfig
import torch
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
with torch.device("meta"):
    Llama(ModelConfig(vocab_size=8))  # what torch imports for its first meta tensor is not to be counted
before = peak()
import_checkpoint(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


def test_the_weights_are_in_memory_once(tmp_path: Path) -> None:
    model = Llama(ModelConfig(vocab_size=4096, hidden_size=1024, num_layers=6, num_heads=8, intermediate_size=1024))
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20
    path = save(model, tmp_path / "step-00000025")
    largest = 4096 * 1024 * 4 / 2**20
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(path), str(tmp_path / "imported")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert size > 140
    assert float(done.stdout) < size + 2 * largest + 16


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.target,)


def malicious_file(folder: Path, target: Path) -> Path:
    torch.save({"state_dict": {}, "hyper_parameters": Malicious(target)}, folder / "last.ckpt")
    return folder / "last.ckpt"


def malicious_plain_pickle(folder: Path, target: Path) -> Path:
    (folder / "last.ckpt").write_bytes(pickle.dumps(Malicious(target)))
    return folder / "last.ckpt"


def malicious_folder(folder: Path, target: Path, states: str = "mp_rank_00_model_states.pt") -> Path:
    tag = folder / "last" / "global_step1"
    tag.mkdir(parents=True)
    (folder / "last" / "latest").write_text("global_step1")
    for name in (states, "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"module": {}, "x": Malicious(target)}, tag / name)
    return folder / "last"


def malicious_tag(folder: Path, target: Path) -> Path:
    return malicious_folder(folder, target, "zero_pp_rank_0_mp_rank_00_model_states.pt") / "global_step1"


@pytest.mark.parametrize("make", [malicious_file, malicious_plain_pickle, malicious_folder, malicious_tag])
def test_a_malicious_pickle_is_refused_by_every_command_and_never_run(tmp_path: Path, refused, make) -> None:
    target = tmp_path / "owned"
    path = str(make(tmp_path, target))
    out = str(tmp_path / "new")
    for arguments in (
        ["import", path, "--out", out],
        ["inspect", path],
        ["generate", path, "--prompt", "x"],
        ["perplexity", path, "--dataset", "x.txt"],
        ["validate", *SMALL, "--ckpt_path", path],
        ["fit", *SMALL, "--trainer.max_steps", "3", "--run.dir", str(tmp_path / "run"), "--model.init_from", path],
    ):
        line = refused(*arguments)
        assert "needs unpickling, which can run code, and is refused" in line
        assert f"llmstack import {path} --out DIR --trust" in line
        assert not target.exists()
    # It is malicious indeed.
    main(["import", path, "--out", out, "--trust"])
    assert target.exists() == (make is not malicious_plain_pickle)
    assert not Path(out).exists()


def test_a_gpt2_folder_is_no_ckpt_and_its_pickle_is_never_run(tmp_path: Path, refused) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2", **GPT2}))
    path, target = str(tmp_path / "gpt2"), tmp_path / "owned"
    malicious_file(tmp_path / "gpt2", target).rename(tmp_path / "gpt2" / "pytorch_model.bin")
    for arguments in (
        ["inspect", path],
        ["generate", path, "--prompt", "x"],
        ["perplexity", path, "--dataset", "x.txt"],
        ["validate", *SMALL, "--ckpt_path", path],
        ["fit", *SMALL, "--trainer.max_steps", "3", "--run.dir", str(tmp_path / "run"), "--model.init_from", path],
    ):
        assert f"run llmstack import {path} --out DIR" in refused(*arguments)
    for trust in ([], ["--trust"]):
        line = refused("import", path, "--out", str(tmp_path / "new"), *trust)
        assert "its weights (pytorch_model.bin) need unpickling, which can run code, and are refused" in line
    assert not target.exists()


def lightning_file(module: LanguageModel, path: Path) -> Path:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize("tie", [True, False])
def test_a_trusted_lightning_file(tmp_path: Path, imported, tie: bool) -> None:
    model = changed(ModelConfig(**BHYT, tie_word_embeddings=tie))
    module = LanguageModel(model.config, compile=False)
    module.adopt(model)
    assert_same(imported(lightning_file(module, tmp_path / "last.ckpt"), "--trust"), model)


def test_a_trusted_file_that_is_none_of_ours_is_one_line(tmp_path: Path, refused) -> None:
    out = ["--out", str(tmp_path / "new"), "--trust"]
    model = changed(ModelConfig(**SIZES))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    contents: dict[str, tuple[Any, str]] = {
        "list.pt": ([1], "no checkpoint of Lightning: there is no state_dict in it"),
        "silent.ckpt": ({"state_dict": state}, "does not say what model it is (no llmstack_config in it)"),
        "newer.ckpt": ({"state_dict": state, "llmstack_config": {**config, "loops": 3}}, "unknown model option loops"),
        "more.ckpt": (
            {"state_dict": {**state, "teacher.weight": torch.ones(2)}, "llmstack_config": config},
            "not in this model teacher.weight",
        ),
        "less.ckpt": ({"state_dict": {}, "llmstack_config": config}, "missing embed_tokens.weight"),
    }
    for name, (content, message) in contents.items():
        torch.save(content, tmp_path / name)
        line = refused("import", str(tmp_path / name), *out)
        assert name in line
        assert message in line
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "silent.ckpt").read_bytes()[:5000])
    assert "cut.ckpt is not readable" in refused("import", str(tmp_path / "cut.ckpt"), *out)


DEEPSPEED = """
import sys
from pathlib import Path
import deepspeed, torch
from deepspeed.utils import safe_get_full_fp32_param
from llmstack.model import Llama, ModelConfig

class Module(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)

deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
for stage, bf16, tie, name in {cases}:
    config = ModelConfig(**{sizes}, tie_word_embeddings=tie)
    torch.manual_seed(0)
    module = Module(Llama(config))
    for tensor in module.state_dict().values():
        tensor.add_(torch.randn_like(tensor) * 0.1 if tensor.is_floating_point() else 7)
    parameters = list(module.parameters())
    groups = [
        {{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1}},
        {{"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}},
    ]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={{
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {{"stage": stage}},
            "bf16": {{"enabled": bf16}},
            "data_types": {{"grad_accum_dtype": "fp32"}},
            "zero_allow_untested_optimizer": True,
        }},
    )
    for step in range(2):
        engine.backward(engine(torch.arange(12).view(1, 12) + rank + step).float().pow(2).mean())
        engine.step()
    folder = Path(sys.argv[1]) / name
    engine.save_checkpoint(folder, client_state={{"llmstack_config": config.to_dict()}})
    tensors = {{name: safe_get_full_fp32_param(p) for name, p in module.model.named_parameters()}}
    tensors |= {{name: b for name, b in module.model.named_buffers() if name in module.model.state_dict()}}
    if rank == 0:
        torch.save(tensors, folder / "expected.pt")
"""

CASES = {
    "zero1-fp32-tied": (1, False, True),
    "zero1-bf16-untied": (1, True, False),
    "zero2-bf16-tied": (2, True, True),
    "zero2-fp32-untied": (2, False, False),
    "zero3-fp32-tied": (3, False, True),
    "zero3-bf16-untied": (3, True, False),
}


@pytest.fixture(scope="module")
def deepspeed_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case, each trained two steps and saved by DeepSpeed on two CPU ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    cases = [(*options, name) for name, options in CASES.items()]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = DEEPSPEED.format(cases=cases, sizes=BHYT)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(folder)],
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-3000:]
    return folder


def expected_tensors(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "expected.pt", weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_a_trusted_deepspeed_folder_gives_the_fp32_masters(deepspeed_folders: Path, imported, case: str) -> None:
    pytest.importorskip("deepspeed")
    expected = expected_tensors(deepspeed_folders / case)
    found = imported(deepspeed_folders / case, "--trust")
    assert found.config.tie_word_embeddings == ("untied" not in case)
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert found.blocks[1].attention_norm.train_length.item() == 32 + 7
    assert found.blocks[1].attention_norm.c_attn.item() != 0
    # They are the masters, not the bf16 weights that were computed with.
    weight = found.blocks[0].mlp.up_proj.weight
    assert torch.equal(weight, weight.bfloat16().float()) == False  # noqa: E712


def test_the_folder_of_the_tag_itself_and_its_step(deepspeed_folders: Path, imported, tmp_path: Path) -> None:
    folder = deepspeed_folders / "zero3-bf16-untied"
    found = imported(folder / "global_step2", "--trust")
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected_tensors(folder).items())
    assert read_checkpoint(tmp_path / "imported").step == 2


def test_a_deepspeed_folder_that_lacks_a_file_is_one_line(deepspeed_folders: Path, refused, tmp_path: Path) -> None:
    folder = deepspeed_folders / "zero2-fp32-untied" / "global_step2"
    out = ["--out", str(tmp_path / "new"), "--trust"]
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        (folder / name).rename(folder.parent / name)
        try:
            line = refused("import", str(folder.parent), *out)
        finally:
            (folder.parent / name).rename(folder / name)
        assert str(folder.parent) in line
