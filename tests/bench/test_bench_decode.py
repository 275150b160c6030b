"""``llmstack bench decode`` on small models."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmstack.bench.decode import Work, bytes_per_step, huggingface_folder, model_with_norm
from llmstack.checkpoint import load_model, write_checkpoint
from llmstack.cli.main import main
from llmstack.inference import Generator
from llmstack.model import Llama, ModelConfig
from tests.test_rooms import hiding_all_but_torch

SHORT = ("--prompt", "5", "--new-tokens", "6", "--context", "16", "--dtype", "fp32")


def small(**overrides: object) -> Llama:
    torch.manual_seed(0)
    values = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Llama(ModelConfig(**{**values, "intermediate_size": 48, "max_position_embeddings": 64, **overrides})).eval()


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = small()
    folder = tmp_path_factory.mktemp("run") / "step-00000001"
    return str(write_checkpoint(folder, step=1, config=model.config.to_dict(), weights=model.state_dict()))


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs as they are traced, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("traced_only")
def test_tables_json_and_plot(ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "decode.json", tmp_path / "decode.png"
    options = ["--modes", "compiled,eager,uncached", "--batch", "1,2", "--output", str(output), "--plot", str(plot)]
    assert main(["bench", "decode", ckpt, *SHORT, *options]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert json.loads(output.read_text()) == found
    assert plot.read_bytes().startswith(b"\x89PNG")
    names = ["rmsnorm folded", "rmsnorm folded eager", "rmsnorm folded uncached"]
    assert [(one["batch"], one["name"]) for one in found["results"]] == [(n, name) for n in (1, 2) for name in names]
    for one in found["results"]:
        ratio, low, high = (1 / value for value in one["ratio_to_first"])
        assert high <= ratio <= low
        assert 0 < one["token_p50_seconds"] <= one["token_p95_seconds"]
        assert one["first_ids_equal"] == 6
        low, high = one["decode_interval"]
        assert 0 < low <= one["decode_tokens_per_second"] <= high


def test_every_norm_and_form(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["rmsnorm", "bhyt", "dyt", "peri_ln", "tapernorm_internal", "fake_ln"]
    options = ["--modes", "eager", "--methods", ",".join(methods), "--forms", "folded,explicit,deferred"]
    assert main(["bench", "decode", ckpt, *SHORT, *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = [f"{name} {form} eager" for name in methods for form in ("folded", "explicit", "deferred")]
    assert [one["name"] for one in found["results"]] == expected
    # The forms of a norm are the same function.
    for first in range(0, len(expected), 3):
        assert len({found["results"][first + form]["first_ids_equal"] for form in range(3)}) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step(tied: bool) -> None:
    """All matrices but a look-up, once; keys and values of the filled positions."""
    model = small(tie_word_embeddings=tied)
    work = Work(batch=3, context=32, prompt=10, new=4)
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48) + 64 * 32
    norms = 2 * 2 * 32 + 32
    cache = 2 * 2 * 2 * 8 * 12 * 3
    explicit = Generator(model, 32, batch_size=3, fold=False)
    tables = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert bytes_per_step(explicit, work) == 4 * (matrices + norms + cache) + tables


def test_another_norm_has_the_same_matrices() -> None:
    model = small()
    other = model_with_norm(model, "dyt")
    assert other.config.norm_method.name == "dyt"
    assert other.blocks[1].mlp.up_proj.weight is model.blocks[1].mlp.up_proj.weight


def test_what_others_are_given_is_the_same_model() -> None:
    model, ids = small(), torch.arange(12).view(2, 6)
    with huggingface_folder(model) as folder:
        loaded = load_model(folder)
    with torch.no_grad():
        assert torch.equal(model(ids), loaded(ids))


def test_it_runs_with_torch_alone(ckpt: str) -> None:
    command = ["bench", "decode", ckpt, *SHORT, "--modes", "eager"]
    code = hiding_all_but_torch(f"from llmstack.cli.main import main\nsys.exit(main({command!r}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["bench"] == "decode"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "nonorm"], "--methods nonorm: unknown (there are: "),
        (["--forms", "bent"], "--forms bent: unknown"),
        (["--modes", ""], "unknown"),
        (["--weights", "int3"], "--weights int3: unknown"),
        (["--batch", "1,x"], "--batch 1,x: not whole numbers"),
        (["--batch", "0"], "--batch 0: not whole numbers"),
        (["--context", "8"], "--context 8 is too small for 5 prompt tokens and 6 new ones"),
        (["--context", "65"], "--context 65: the model has 64 positions"),
        (["--new-tokens", "1"], "--new-tokens is 1"),
        (["--rounds", "5"], "--rounds is 5"),
        (["--against", "vllm"], "--against vllm: unknown"),
        (["--against", "litgpt", "--peers", "/nowhere"], "`bash scripts/peers.sh` makes an environment"),
        (["--output", "/nowhere/at/all.json"], "there is no such folder"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    ckpt: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", ckpt, *SHORT, *options]) == 2
    out, err = capsys.readouterr()
    assert (message in err, err.count("\n"), out) == (True, 1, "")
