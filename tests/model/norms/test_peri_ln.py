"""Peri-LN (arXiv 2502.02732): a norm on both sides of every sub-layer, and on the embedding or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llmstack.model import Llama, ModelConfig
from llmstack.model.norms.rmsnorm import RMSNorm

Build = Callable[..., ModelConfig]


def rms(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def test_block_formula(small: Build) -> None:
    torch.manual_seed(0)
    block = Llama(small(norm={"method": "peri_ln"}, positions="none")).double().blocks[1]
    gains = [site.weight for site in (block.attention_norm, block.after_attention, block.mlp_norm, block.after_mlp)]
    with torch.no_grad():
        for gain in gains:
            gain.normal_(1.0, 0.3)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    y = x + rms(block.attention(rms(x, gains[0]), None), gains[1])
    torch.testing.assert_close(block(x), y + rms(block.mlp(rms(y, gains[2])), gains[3]))


def test_gains_are_four_per_block_and_trained(small: Build) -> None:
    model = Llama(small(norm={"method": "peri_ln"}))
    model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
    gains = {name: weight for name, weight in model.named_parameters() if weight.ndim == 1}
    assert len(gains) == 4 * 2 + 2
    for name, gain in gains.items():
        assert torch.equal(gain, torch.ones(32)), name
        assert gain.grad is not None, name
        assert gain.grad.abs().max() > 0, name


def test_what_a_sub_layer_adds_has_rms_one_at_the_start() -> None:
    """At a width where what it adds is far above epsilon; a Pre-LN block adds something else."""
    added: list[Tensor] = []

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        added.append(output)

    for norm, expected in (("peri_ln", True), ("rmsnorm", False)):
        torch.manual_seed(0)
        added.clear()
        model = Llama(ModelConfig(vocab_size=64, hidden_size=256, initialisation="fan_in", norm={"method": norm}))
        for block in model.blocks:
            block.after_attention.register_forward_hook(note)
            block.after_mlp.register_forward_hook(note)
        model(torch.arange(40).view(2, 20))
        levels = [update.pow(2).mean().sqrt().item() for update in added]
        assert len(levels) == 8
        assert (levels == pytest.approx([1.0] * 8, rel=1e-2)) == expected


@pytest.mark.parametrize("embedding_norm", [True, False])
def test_embedding_norm_is_a_choice(small: Build, embedding_norm: bool) -> None:
    model, ids = Llama(small(norm={"method": "peri_ln", "embedding_norm": embedding_norm})), torch.arange(6)[None]
    embedded = model.embed_tokens.weight[ids]
    torch.testing.assert_close(model._embed(ids, ids), rms(embedded) if embedding_norm else embedded)
    assert type(model.norm) is RMSNorm
