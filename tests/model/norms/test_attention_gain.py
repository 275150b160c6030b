"""c_attn: what it stands for, its cheap form, its life in training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmstack.model import Llama, ModelConfig
from llmstack.model.attention import Attention
from llmstack.model.norms.bhyt import BHyT, refresh_interval, value_output_gain

Build = Callable[..., ModelConfig]


def attention(hidden_size: int, num_heads: int, num_kv_heads: int, std: float = 0.02) -> Attention:
    torch.manual_seed(0)
    module = Attention(
        ModelConfig(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, vocab_size=8)
    )
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_() if weight.ndim == 1 else weight.normal_(0, std)
    return module


def test_is_the_variance_of_uniform_attention() -> None:
    """400 sequences of 128 independent tokens of unit variance; W_Q = 0 makes attention uniform."""
    width, length = 256, 128
    module = attention(width, num_heads=4, num_kv_heads=4)
    with torch.no_grad():
        module.q_proj.weight.zero_()
        everything = torch.ones(400, 1, 1, length, dtype=torch.bool)
        tokens = torch.randn(400, length, width)
        # All queries attend alike, so one per sequence will do.
        values = module.v_proj(tokens).view(400, length, 4, 64).transpose(1, 2)
        keys = module.k_proj(tokens).view(400, length, 4, 64).transpose(1, 2)
        mixed = module._attend(torch.zeros(400, 4, 1, 64), keys, values, everything)
        output = module.o_proj(mixed.transpose(1, 2).reshape(400, width))
        c_attn = value_output_gain(module) / (length * width)
    assert output.pow(2).mean().item() == pytest.approx(c_attn.item(), rel=0.01)


def full_product(module: Attention) -> Tensor:
    """W_V W_O as a [hidden, hidden] matrix, every query head with its own copy of its value head."""
    per_head = module.v_proj.weight.double().view(module.kv_heads, module.head_dim, -1)
    expanded = per_head.repeat_interleave(module.num_heads // module.kv_heads, dim=0).flatten(0, 1)
    return module.o_proj.weight.double() @ expanded


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_cheap_form_is_the_squared_norm_of_the_expanded_product(kv_heads: int) -> None:
    module = attention(64, num_heads=8, num_kv_heads=kv_heads, std=0.5)
    exact = full_product(module).pow(2).sum().item()
    assert value_output_gain(module).item() == pytest.approx(exact, rel=1e-6)
    assert value_output_gain(module.double()).dtype == torch.float32


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(2048, 32, 32), (2048, 32, 8), (1024, 16, 4)])
def test_value_at_initialisation(width: int, heads: int, kv_heads: int) -> None:
    """d²·σ⁴/T for any grouping: a group sums g blocks of W_O (variance g·σ²) over 1/g as many value channels."""
    gain = value_output_gain(attention(width, heads, kv_heads)) / (1024 * width)
    assert gain.item() == pytest.approx(width**2 * 0.02**4 / 1024, rel=0.01)
    if width == 2048:
        assert gain.item() == pytest.approx(6.55e-4, rel=0.01)


def c_attn(model: Llama) -> list[float]:
    return [block.attention_norm.c_attn.item() for block in model.layers]


def bhyt(small: Build, seed: int = 0, **overrides: Any) -> Llama:
    torch.manual_seed(seed)
    return Llama(small(**{"norm": {"method": "bhyt"}, **overrides}))


def test_of_the_initialised_weights_and_the_training_length(small: Build) -> None:
    published = bhyt(small)
    for block, value in zip(published.layers, c_attn(published), strict=True):
        exact = full_product(block.attention).pow(2).sum().item() / (1024 * 32)
        assert value == pytest.approx(exact, rel=1e-5)
    short = bhyt(small, norm={"method": "bhyt", "train_length": 256})
    assert c_attn(short) == pytest.approx([4 * value for value in c_attn(published)], rel=1e-6)
    assert short.layers[0].attention_norm.train_length.item() == 256


def test_after_materialising_a_meta_model(small: Build) -> None:
    with torch.device("meta"):
        model = Llama(small(norm={"method": "bhyt"}))
    direct = bhyt(small)
    for built in (model.to_empty(device="cpu"), direct):
        torch.manual_seed(0)
        built.initialise()
    assert c_attn(model) == c_attn(direct)
    assert min(c_attn(model)) > 0


def test_unchanged_by_positions_queries_and_keys(small: Build) -> None:
    model = bhyt(small)
    before = c_attn(model)
    assert c_attn(bhyt(small, positions="none")) == before
    with torch.no_grad():
        for block in model.layers:
            block.attention.q_proj.weight.normal_()
            block.attention.k_proj.weight.normal_()
    BHyT().refresh(model)
    assert c_attn(model) == before


@pytest.mark.parametrize(("max_steps", "interval"), [(20000, 400), (100000, 1000), (50, 1), (10, 1)])
def test_refresh_interval(max_steps: int, interval: int) -> None:
    assert refresh_interval(max_steps) == interval


def test_refreshed_on_schedule_only(small: Build) -> None:
    model = bhyt(small)
    before = c_attn(model)
    with torch.no_grad():
        for block in model.layers:
            block.attention.o_proj.weight.mul_(2)
    method = model.config.norm_method
    for step in (1, 399, 401):
        method.after_step(model, step, max_steps=20000)
    assert c_attn(model) == before
    method.after_step(model, 400, max_steps=20000)
    assert c_attn(model) == pytest.approx([4 * value for value in before], rel=1e-6)


def test_saved_with_the_weights(small: Build) -> None:
    trained = bhyt(small, norm={"method": "bhyt", "train_length": 96})
    with torch.no_grad():
        trained.layers[0].attention_norm.c_attn.fill_(0.123)  # stale: not what the weights give
    restored = bhyt(small, seed=1)
    restored.load_state_dict(trained.state_dict())
    assert c_attn(restored) == c_attn(trained)
    assert restored.layers[1].attention_norm.train_length.item() == 96


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_and_tables_survive_a_cast(small: Build, dtype: torch.dtype) -> None:
    norm = {"method": "bhyt", "trainable_lambda": False, "kappa": 9.87654321, "lambda_mlp": 1.23456789}
    model = bhyt(small, norm=norm, residual_dropout=0.1, residual_dropout_schedule="linear")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    after = dict(model.named_buffers())
    for kind in ("c_attn", "kappa", "lam", "inv_freq", "rate"):
        assert any(name.endswith(kind) for name in after)
    for name, buffer in after.items():
        assert buffer.dtype == before[name].dtype, name
        assert torch.equal(buffer, before[name]), name
    assert all(weight.dtype == dtype for weight in model.parameters())
    assert model(torch.arange(8)[None]).dtype == dtype
