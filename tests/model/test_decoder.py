"""The decoder's options against their formulas: positions, MLPs, residuals, initialisation, dropout, sizes."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.llama import MLP, Dropout, sinusoidal_positions
from llmstack.model.norms import METHODS

Build = Callable[..., ModelConfig]


def build(config: ModelConfig, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(config).eval()


# Positions


def test_sinusoidal_values() -> None:
    table = sinusoidal_positions(torch.arange(50)[None], 16)[0]
    for position in (0, 1, 7, 49):
        for pair in range(8):
            angle = position / 10000 ** (2 * pair / 16)
            expected = [math.sin(angle), math.cos(angle)]
            assert table[position, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "none"])
def test_positions_are_added_to_the_embedding(small: Build, kind: str) -> None:
    model, ids = build(small(positions=kind)), torch.randint(67, (2, 6))
    positions = torch.tensor([[3, 1, 4, 1, 5, 9]]).expand(2, -1)
    expected = F.embedding(ids, model.embed_tokens.weight)
    if kind == "learned":
        expected = expected + model.embed_positions.weight[positions]
    elif kind == "sinusoidal":
        expected = expected + sinusoidal_positions(positions, 32)
    assert torch.equal(model._embed(ids, positions), expected)
    assert model.rotary is None


def test_without_positions_order_is_invisible(small: Build) -> None:
    ids = torch.randint(67, (1, 8))
    swapped = ids[:, [2, 0, 1, 3, 4, 5, 6, 7]]
    for kind, equal in (("none", True), ("rope", False), ("learned", False), ("sinusoidal", False)):
        model = build(small(positions=kind, num_layers=1))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(8.0) if weight.ndim == 2 else None
            difference = (model(ids)[:, -1] - model(swapped)[:, -1]).abs().max()
        assert (difference < 1e-4) == equal, kind


# MLP, residuals, head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "gelu", "relu"])
def test_mlp_formulas(small: Build, kind: str, bias: bool) -> None:
    mlp, x = MLP(small(mlp=kind, mlp_bias=bias)).double(), torch.randn(3, 32, dtype=torch.float64)

    def linear(name: str, value: Tensor) -> Tensor:
        layer = getattr(mlp, name)
        assert (layer.bias is not None) == bias
        return value @ layer.weight.T + (layer.bias if bias else 0.0)

    def gelu(value: Tensor) -> Tensor:
        return value * 0.5 * (1 + torch.erf(value / 2**0.5))

    up = linear("up_proj", x)
    if kind == "swiglu":
        gate = linear("gate_proj", x)
        inner = gate / (1 + torch.exp(-gate)) * up
    elif kind == "geglu":
        inner = gelu(linear("gate_proj", x)) * up
    else:
        inner = gelu(up) if kind == "gelu" else up.clamp(min=0)
        assert not hasattr(mlp, "gate_proj")
    torch.testing.assert_close(mlp(x), linear("down_proj", inner))


@pytest.mark.parametrize("residual", [True, False])
def test_residual_switch(small: Build, residual: bool) -> None:
    block, x = build(small(residual=residual, positions="none")).layers[0], torch.randn(2, 5, 32)
    kept = 1.0 if residual else 0.0
    u, carry = block.attention_norm(x)
    y = kept * x + block.attention(u, None)
    torch.testing.assert_close(block(x), kept * y + block.mlp(block.mlp_norm(y, carry)))


def test_head_bias_and_tying(small: Build) -> None:
    tied, untied = build(small(lm_head_bias=True)), build(small(tie_word_embeddings=False))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert "lm_head.weight" not in tied.state_dict()
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    assert "lm_head.bias" in tied.state_dict()
    ids = torch.randint(67, (1, 4))
    with torch.no_grad():
        tied.lm_head.bias.normal_()
    hidden = tied.hidden_states(ids)
    torch.testing.assert_close(tied(ids), hidden @ tied.embed_tokens.weight.T + tied.lm_head.bias)


@pytest.mark.parametrize("tied", [True, False])
def test_state_dict_round_trip(small: Build, tied: bool) -> None:
    config = small(tie_word_embeddings=tied)
    model, other, ids = build(config), build(config, seed=1), torch.randint(67, (1, 4))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), model(ids))


# Initialisation


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", ["normal", "fan_in", "depth_scaled"])
@pytest.mark.parametrize("tied", [True, False])
def test_standard_deviation_of_every_weight_class(kind: str, meta: bool, tied: bool) -> None:
    config = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_layers=3,
        num_kv_heads=2,
        intermediate_size=384,
        positions="learned",
        max_position_embeddings=256,
        attention_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        tie_word_embeddings=tied,
        initialisation=kind,
        initializer_range=0.03,
    )
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Llama(config)
    if meta:
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().fill_(float("nan"))
        model.initialise()
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == (1.0 if "norm" in name and "bias" not in name else 0.0)).all(), name
            continue
        expected = 0.03
        if kind == "fan_in" and name.startswith("layers"):
            expected = weight.shape[1] ** -0.5
        if kind == "depth_scaled" and name.endswith(("o_proj.weight", "down_proj.weight")):
            expected = 0.03 / math.sqrt(6)
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(weight.mean().item()) < 0.05 * expected, name
    assert all(buffer.isfinite().all() for buffer in model.buffers())


# Dropout


def test_linear_dropout_schedule(small: Build) -> None:
    linear = small(num_layers=5, residual_dropout=0.3, residual_dropout_schedule="linear")
    rates = [block.dropout.rate for block in Llama(linear).layers]
    assert all(isinstance(rate, Tensor) for rate in rates)
    assert [rate.item() for rate in rates] == pytest.approx([0.0, 0.075, 0.15, 0.225, 0.3])
    constant = Llama(small(residual_dropout=0.3))
    assert [block.dropout.rate.item() for block in constant.layers] == pytest.approx([0.3, 0.3])
    assert small(num_layers=1, residual_dropout=0.3, residual_dropout_schedule="linear").dropout_rate(0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_rate_and_mean(dtype: torch.dtype) -> None:
    dropout, ones = Dropout(0.3).to(dtype), torch.ones(1000, 1000, dtype=dtype)
    torch.manual_seed(0)
    dropped = dropout(ones)
    assert dropped.dtype == dtype
    assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=3e-3)
    assert dropped.float().mean().item() == pytest.approx(1.0, abs=5e-3)
    assert dropped.float().unique().tolist() == pytest.approx([0.0, 1 / 0.7], rel=5e-3)
    assert dropout.eval()(ones) is ones


@pytest.mark.parametrize("option", ["residual_dropout", "embedding_dropout"])
def test_dropout_is_seeded_and_off_in_evaluation(small: Build, option: str) -> None:
    model, ids = build(small(**{option: 0.2})).train(), torch.randint(67, (1, 8))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert torch.equal(model.eval()(ids), build(small())(ids))


# Sizes, refusals, imports


@pytest.mark.parametrize(
    ("preset", "parameters"), [("374m", 374_637_568), ("1b", 1_235_814_400), ("3b", 3_212_749_824)]
)
def test_parameter_counts(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(ModelConfig.preset(preset))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_vocabulary_must_be_known(small: Build) -> None:
    with pytest.raises(UserError, match="vocab_size"):
        Llama(small(vocab_size=None))


@pytest.mark.parametrize("norm", sorted(METHODS))
def test_autocast_streams_in_bf16(small: Build, norm: str) -> None:
    model, ids = build(small(norm={"method": norm})), torch.randint(67, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden_states(ids)
        assert hidden.dtype == model(ids).dtype == torch.bfloat16
    exact = model.hidden_states(ids)
    assert (hidden - exact).norm() < 0.03 * exact.norm()


ALONE = """
import sys
foreign = "lightning pytorch_lightning deepspeed datasets transformers lm_eval tokenizers pyarrow numpy".split()
sys.modules.update(dict.fromkeys(foreign))  # importing one of these now fails
import torch
import llmstack.model, llmstack.model.compile
from llmstack.model import Llama, ModelConfig
logits = Llama(ModelConfig(vocab_size=8, norm={"method": "bhyt"}))(torch.arange(8)[None])
assert logits.shape == (1, 8, 8) and ModelConfig.preset("1b").hidden_size == 2048
assert not any(sys.modules.get(name) for name in foreign)
"""


def test_needs_torch_and_yaml_alone() -> None:
    run: Any = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
