"""``llmstack inspect`` on a Hugging Face folder and on a checkpoint of ours with BHyT."""

import json
from pathlib import Path

import pytest
import torch

from llmstack.checkpoint import write_checkpoint
from llmstack.cli.main import main
from llmstack.model import Llama, ModelConfig


@pytest.fixture(scope="module")
def bhyt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Llama]:
    torch.manual_seed(0)
    model = Llama(ModelConfig(vocab_size=64, norm={"method": "bhyt", "train_length": 32}))
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            block.mlp_norm.lam.fill_(1 + index)
    folder = write_checkpoint(
        tmp_path_factory.mktemp("run") / "step-00000040",
        step=40,
        config=model.config.to_dict(),
        weights=model.state_dict(),
        state={"tokens_seen": 4096, "data": {"order_seed": 7}},
    )
    return folder, model


def described(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_stories260k(shared: Path, capsys: pytest.CaptureFixture[str]):
    found = described(capsys, str(shared / "checkpoints/stories260K/hf"), "--dtype", "fp32", "--batch", "3")
    assert found["parameters"]["total"] == 260_032
    assert (found["architecture"]["num_kv_heads"], found["architecture"]["head_dim"]) == (4, 8)
    assert found["norm"]["sites"] == {
        "layers.*.attention_norm": "FirstRMSNorm",
        "layers.*.mlp_norm": "RMSNorm",
        "norm": "RMSNorm",
    }
    assert found["kv_cache"]["bytes"] == 2 * 5 * 4 * 8 * 512 * 3 * 4
    assert found["training"] is None
    assert found["tokenizer"] is not None
    int8 = described(capsys, str(shared / "checkpoints/stories260K/hf"), "--dtype", "int8", "--context", "10")
    # A byte for each number, four for the scale of each vector.
    assert int8["kv_cache"]["bytes"] == 2 * 5 * 4 * 10 * (8 + 4)


def test_bhyt_shows_its_sites_its_values_and_the_training_state(
    bhyt: tuple[Path, Llama], capsys: pytest.CaptureFixture[str]
):
    folder, model = bhyt
    found = described(capsys, str(folder), "--context", "100")
    assert found["norm"]["options"]["kappa"] == 10
    assert found["norm"]["sites"]["layers.*.mlp_norm"] == "SecondBHyT"
    values = found["norm"]["values"]
    assert values["layers.*.attention_norm.lam"] == [2, 2, 2, 2]
    assert values["layers.*.mlp_norm.lam"] == [1, 2, 3, 4]
    assert values["layers.*.attention_norm.train_length"] == [32] * 4
    c_attn = [block.attention_norm.c_attn.item() for block in model.blocks]
    assert values["layers.*.attention_norm.c_attn"] == c_attn
    assert min(c_attn) > 0
    assert found["kv_cache"]["bytes"] == 2 * 4 * 4 * 32 * 100 * 2
    assert found["training"] == {"step": 40, "tokens_seen": 4096, "data": {"order_seed": 7}}


def test_text_names_every_part(bhyt: tuple[Path, Llama], capsys: pytest.CaptureFixture[str]):
    folder, model = bhyt
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    total = sum(parameter.numel() for parameter in model.parameters())
    for expected in (f"{total:,}", "SecondBHyT", "lambda_attention 2.0", "1 2 3 4", "KV cache", "tokens_seen", "40"):
        assert expected in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "4097"], "--context is 4097; this model has 1 to 4096 positions"),
        (["--batch", "0"], "--batch is 0"),
        (["--dtype", "int3"], "invalid choice"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    bhyt: tuple[Path, Llama], capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert main(["inspect", str(bhyt[0]), *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_no_checkpoint_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
