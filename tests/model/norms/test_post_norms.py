"""Norms that act on the sum: Post-LN (arXiv 1706.03762), DeepNorm (2203.00555), Mix-LN (2412.13795)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.kv_cache import KVCache
from llmstack.model.llama import Block, PostNormBlock
from llmstack.model.norms.deep_norm import DeepNorm
from llmstack.model.norms.mix_ln import MixLN
from llmstack.model.norms.rmsnorm import RMSNorm

Build = Callable[..., ModelConfig]


def build(small: Build, method: str, layers: int = 2, options: dict[str, Any] | None = None, **others: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(small(norm={"method": method, **(options or {})}, num_layers=layers, **others))


def with_gains(model: Llama) -> Llama:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.3)
    return model


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


ALPHAS = [
    *[("post_ln", layers, {}, 1.0) for layers in (2, 8)],
    *[("deep_norm", layers, {}, (2 * layers) ** 0.25) for layers in (2, 8)],
    ("deep_norm", 2, {"alpha": 2.828}, 2.828),
]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("method", "layers", "options", "alpha"), ALPHAS)
def test_block_formula(
    small: Build, method: str, layers: int, options: dict[str, Any], alpha: float, residual: bool
) -> None:
    """x = N(α·x + Attention(x)), then N(α·x + MLP(x)); without residuals N(F(x))."""
    model = with_gains(build(small, method, layers, options, positions="none", residual=residual)).double()
    block, x = model.blocks[-1], torch.randn(2, 7, 32, dtype=torch.float64)
    kept = alpha if residual else 0.0
    y = rms(kept * x + block.attention(x, None), block.attention_norm.weight)
    torch.testing.assert_close(block(x), rms(kept * y + block.mlp(y), block.mlp_norm.weight))


@pytest.mark.parametrize("method", ["post_ln", "deep_norm"])
def test_no_final_norm_and_two_gains_per_block(small: Build, method: str) -> None:
    model, ids = build(small, method), torch.arange(8)[None]
    assert isinstance(model.norm, nn.Identity)
    assert sum(weight.ndim == 1 for weight in model.parameters()) == 2 * 2
    # The last block's own norm: what the head reads has rms 1.
    torch.testing.assert_close(model.hidden_states(ids).pow(2).mean(-1), torch.ones(1, 8), rtol=1e-3, atol=0)


def test_deep_norm_constants() -> None:
    """At 32 decoder layers: α = 64^(1/4) = 2.828 and β = 256^(−1/4) = 1/4; at 8: 2 and 64^(−1/4) = 0.354."""
    for layers, alpha, beta in ((32, 2.828, 0.25), (8, 2.0, 0.3536)):
        config = ModelConfig(vocab_size=8, num_layers=layers)
        assert DeepNorm().residual_scale(config) == pytest.approx(alpha, abs=1e-3)
        linear = nn.Linear(100, 300)
        for name, gain in (("mlp.up_proj", beta), ("attention.q_proj", 1.0)):
            std = DeepNorm().weight_std(config, f"layers.5.{name}", linear)
            assert std == pytest.approx(gain * math.sqrt(2 / 400), rel=1e-3), name


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("beta", [None, 0.7])
def test_deep_norm_initialisation(beta: float | None, meta: bool) -> None:
    """Xavier with gain β for V, O and MLP, 1 for Q and K, whatever ``initialisation`` says of other methods."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_layers=3,
        num_kv_heads=2,
        initialisation="depth_scaled",
        initializer_range=0.03,
        norm={"method": "deep_norm", "beta": beta},
    )
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Llama(config)
    if meta:
        model.to_empty(device="cpu").initialise()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            continue
        expected = 0.03
        if name.startswith("layers"):
            gain = 1.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else beta or 24**-0.25
            expected = gain * math.sqrt(2 / sum(weight.shape))
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("option", ["alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_deep_norm_constant_is_named(option: str, value: float) -> None:
    with pytest.raises(UserError, match=option):
        DeepNorm(**{option: value})


@pytest.mark.parametrize(
    ("layers", "share", "post"), [(12, 0.25, 3), (24, 0.25, 6), (4, 0.25, 1), (2, 0.25, 1), (8, 0.0, 0), (8, 1.0, 8)]
)
def test_mix_ln_is_post_below_and_pre_above(small: Build, layers: int, share: float, post: int) -> None:
    model = build(small, "mix_ln", layers, {"post_share": share})
    assert [type(block) for block in model.blocks] == [PostNormBlock] * post + [Block] * (layers - post)
    assert isinstance(model.norm, nn.Identity if post == layers else RMSNorm)


@pytest.mark.parametrize(("share", "same"), [(0.0, "rmsnorm"), (1.0, "post_ln")])
def test_mix_ln_at_its_ends_is_one_of_the_two(small: Build, share: float, same: str) -> None:
    ids = torch.randint(67, (2, 9))
    mixed, plain = build(small, "mix_ln", 3, {"post_share": share}), build(small, same, 3)
    assert torch.equal(mixed(ids), plain(ids))


def test_mix_ln_by_hand(small: Build) -> None:
    model = with_gains(build(small, "mix_ln", 4, positions="none")).double()
    ids = torch.randint(67, (2, 9))
    x = model.embed_tokens(ids)
    for layer, block in enumerate(model.blocks):
        first, second = block.attention_norm.weight, block.mlp_norm.weight
        if layer == 0:
            x = rms(x + block.attention(x, None), first)
            x = rms(x + block.mlp(x), second)
        else:
            x = x + block.attention(rms(x, first), None)
            x = x + block.mlp(rms(x, second))
    torch.testing.assert_close(model.hidden_states(ids), rms(x, model.norm.weight))


def test_mix_ln_embedding_std() -> None:
    """The authors' code: sqrt(2/5); everything else as the architecture says."""
    for value, expected in ((None, 0.02), (0.632, math.sqrt(2 / 5))):
        config = ModelConfig(vocab_size=512, norm={"method": "mix_ln", "embedding_std": value})
        torch.manual_seed(0)
        for name, weight in Llama(config).named_parameters():
            if weight.ndim == 2:
                std = expected if name == "embed_tokens.weight" else 0.02
                assert weight.std().item() == pytest.approx(std, rel=0.03), name


@pytest.mark.parametrize(
    ("option", "value"),
    [("post_share", -0.1), ("post_share", 1.1), ("post_share", float("nan")), ("embedding_std", 0.0)],
)
def test_bad_mix_ln_option_is_named(option: str, value: float) -> None:
    with pytest.raises(UserError, match=option):
        MixLN(**{option: value})


@pytest.mark.parametrize("method", ["post_ln", "deep_norm", "mix_ln"])
def test_decoding_with_a_cache_is_the_full_forward(small: Build, method: str) -> None:
    """Through the code of ``Block.forward``, as the generator calls and compiles it for every block."""
    model = with_gains(build(small, method, 4)).double().eval()
    ids = torch.randint(67, (2, 12))
    cache = KVCache(model.config, 2, 16, torch.float64, "cpu")
    with torch.no_grad():
        for block in model.blocks:
            block.forward = Block.forward.__get__(block)  # type: ignore[method-assign]
        steps = [model(ids[:, i : i + 1], positions=torch.full((2, 1), i), cache=cache) for i in range(ids.shape[1])]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["post_ln", "deep_norm"])
def test_dropout_acts_on_the_update_before_the_sum(small: Build, method: str) -> None:
    model = build(small, method, residual_dropout=0.5, positions="none").train()
    block, x = model.blocks[0], torch.randn(2, 7, 32)
    alpha = block.norm_method.residual_scale(model.config)
    torch.manual_seed(3)
    ours = block(x)
    torch.manual_seed(3)
    y = block.attention_norm(alpha * x + block.dropout(block.attention(x, None)))
    torch.testing.assert_close(ours, block.mlp_norm(alpha * y + block.dropout(block.mlp(y))))
    assert not torch.equal(ours, block.eval()(x))
