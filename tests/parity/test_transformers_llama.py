"""Against transformers' Llama: logits, every gradient, rotary frequencies, padding, RMSNorm."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmstack.model import Llama, ModelConfig, RopeScaling
from llmstack.model.norms.rmsnorm import RMSNorm
from llmstack.model.rope import inverse_frequencies

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 97, 24
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CASES: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_kv_heads": 2},
    "one-kv-head": {"num_kv_heads": 1},
    "head-dim": {"num_kv_heads": 2, "head_dim": 32},
    "rope-factor-8": {"num_kv_heads": 2, "rope_scaling": RopeScaling(factor=8.0)},
    "rope-factor-32": {"num_kv_heads": 2, "rope_scaling": RopeScaling(factor=32.0)},
    "tied": {"num_kv_heads": 2, "tie_word_embeddings": True},
    "biases": {"num_kv_heads": 2, "attention_bias": True, "mlp_bias": True},
}


def reference_config(config: ModelConfig) -> Any:
    """The same architecture as a transformers configuration."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(config.rope_scaling)}
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        attn_implementation="eager",
    )


def our_name(name: str) -> str:
    """Hugging Face's parameter name -> ours."""
    name = name.removeprefix("model.")
    for theirs, ours in (
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn", "attention"),
    ):
        name = name.replace(theirs, ours)
    return name


def pair(case: str) -> tuple[Any, Llama]:
    """Their model with random weights (gains around 1, std 0.02 elsewhere) and ours with the same."""
    config = ModelConfig(**{**BASE, **CASES[case]})
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(reference_config(config)).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.02)
    ours = Llama(config).eval()
    ours.load_state_dict({our_name(name): tensor for name, tensor in theirs.state_dict().items()})
    return theirs, ours


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference in units of the reference's root mean square."""
    return ((ours - theirs).abs().max() / theirs.pow(2).mean().sqrt()).item()


def far_positions() -> Tensor:
    """Positions thousands apart, where the scaled low frequencies matter."""
    return (torch.arange(LENGTH) * 1511)[None].expand(2, -1)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients(case: str) -> None:
    theirs, ours = pair(case)
    ids, labels = torch.randint(VOCAB, (2, LENGTH)), torch.randint(VOCAB, (2, LENGTH))
    labels[0, :5] = -100
    positions = far_positions()
    logits = theirs(ids, position_ids=positions).logits
    assert error(ours(ids, positions=positions), logits) < 1e-4

    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean").backward()
    valid = (labels != -100).sum()
    ours.lm_head(ours.hidden_states(ids, positions=positions), labels, valid).backward()
    reference = {our_name(name): weight.grad for name, weight in theirs.named_parameters()}
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert error(gradient, reference[name]) < 1e-4, name


def test_the_comparison_sees_a_wrong_scaling_factor() -> None:
    theirs, _ = pair("rope-factor-8")
    _, ours = pair("rope-factor-32")
    ids, positions = torch.randint(VOCAB, (2, LENGTH)), far_positions()
    with torch.no_grad():
        assert error(ours(ids, positions=positions), theirs(ids, position_ids=positions).logits) > 1e-3


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_frequencies(factor: float, head_dim: int) -> None:
    config = ModelConfig(
        **{**BASE, "head_dim": head_dim, "rope_scaling": RopeScaling(factor=factor)}  # original 8192
    )
    initialise = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    expected, attention_factor = initialise(reference_config(config), torch.device("cpu"))
    assert attention_factor == 1.0
    torch.testing.assert_close(inverse_frequencies(config), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(side: str) -> None:
    theirs, ours = pair("gqa")
    ids, real = torch.randint(VOCAB, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.long)
    for row, missing in enumerate((0, 5, 11)):
        padding = slice(LENGTH - missing, LENGTH) if side == "right" else slice(0, missing)
        real[row, padding] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real, position_ids=positions).logits
        logits = ours(ids, positions=positions, padding_mask=real)
    assert logits.isfinite().all()
    assert error(logits[real.bool()], expected[real.bool()]) < 1e-4


@pytest.mark.parametrize("scale", [1e3, 1.0, 1e-2, 1e-4])
def test_rmsnorm_is_bit_equal_in_bf16(scale: float) -> None:
    torch.manual_seed(0)
    theirs = transformers.models.llama.modeling_llama.LlamaRMSNorm(256, eps=1e-5).bfloat16()
    ours = RMSNorm(256, eps=1e-5).bfloat16()
    with torch.no_grad():
        ours.weight.normal_(1.0, 0.3)
        theirs.weight.copy_(ours.weight)
    x = ((torch.rand(64, 256) * 2 - 1) * scale).bfloat16().requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours_out, theirs_out = ours(x), theirs(y)
    assert torch.equal(ours_out, theirs_out)
    upstream = torch.randn_like(ours_out)
    ours_out.backward(upstream)
    theirs_out.backward(upstream)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
