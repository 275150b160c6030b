"""Against transformers' GPT-2, saved by transformers and imported: logits, every gradient, greedy tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmstack.checkpoint import import_checkpoint, load_model
from llmstack.inference import Generator
from llmstack.model import Llama

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 97, 24
BASE = {"vocab_size": VOCAB, "n_positions": 48, "n_embd": 32, "n_layer": 3, "n_head": 4}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "untied": {"tie_word_embeddings": False},
    "n-inner": {"n_inner": 52},
    "gelu": {"activation_function": "gelu"},
    "gelu-fast": {"activation_function": "gelu_fast"},
    "gelu-pytorch-tanh": {"activation_function": "gelu_pytorch_tanh"},
    "relu": {"activation_function": "relu"},
    "unscaled": {"scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True},
    "one-head": {"n_head": 1},
    "odd": {"vocab_size": 131, "n_embd": 21, "n_head": 3, "n_inner": 13, "layer_norm_epsilon": 1e-3},
    "no-dropout": {"resid_pdrop": 0.0, "embd_pdrop": 0, "attn_pdrop": 0.0},
}


def random_gpt2(**options: Any) -> Any:
    """Weights large enough for every activation to bend; gains and biases off their initial values."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**BASE, **options}, bos_token_id=0, eos_token_id=1)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_gain = ".ln_" in name and name.endswith(".weight")
            weight.normal_(1.0 if is_gain else 0.0, 0.2 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
    return model


def imported(theirs: Any, folder: Path, **saving: Any) -> Llama:
    theirs.save_pretrained(folder / "gpt2", **saving)
    import_checkpoint(folder / "gpt2", folder / "ours")
    return load_model(folder / "ours")


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference in units of the reference's root mean square."""
    return ((ours - theirs).abs().max() / theirs.pow(2).mean().sqrt()).item()


def in_their_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of our parameters, as GPT-2 would hold them."""
    theirs = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            tensor = torch.cat([tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
        name = name.replace("layers.", "h.").replace("attention_norm", "ln_1").replace("mlp_norm", "ln_2")
        name = name.replace("attention.q_proj", "attn.c_attn").replace("attention.o_proj", "attn.c_proj")
        name = name.replace("up_proj", "c_fc").replace("down_proj", "c_proj").replace("norm.", "ln_f.")
        name = name.replace("embed_tokens", "wte").replace("embed_positions", "wpe")
        is_conv1d = tensor.ndim == 2 and name.startswith("h.")
        theirs[name if name == "lm_head.weight" else f"transformer.{name}"] = tensor.T if is_conv1d else tensor
    return theirs


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients(case: str, tmp_path: Path) -> None:
    theirs = random_gpt2(**CASES[case])
    ours = imported(theirs, tmp_path)
    ids, labels = torch.randint(VOCAB, (2, LENGTH)), torch.randint(VOCAB, (2, LENGTH))
    labels[0, :5] = -100
    logits = theirs(ids).logits
    assert error(ours(ids), logits) < 1e-4

    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean").backward()
    ours.lm_head(ours.hidden_states(ids), labels, (labels != -100).sum()).backward()
    reference = {name: weight.grad for name, weight in theirs.named_parameters()}
    gradients = in_their_layout({name: weight.grad for name, weight in ours.named_parameters()})
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        # The gradient of a key's bias is zero but for rounding, a third of c_attn's; the whole tensor is the measure.
        assert error(gradient, reference[name]) < 1e-4, name


@pytest.mark.parametrize("case", ["default", "untied", "unscaled"])
def test_greedy_tokens_to_the_last_position(case: str, tmp_path: Path) -> None:
    theirs = random_gpt2(**CASES[case])
    ours = imported(theirs, tmp_path)
    prompt, positions = [3, 14, 15, 92], BASE["n_positions"]
    expected = theirs.generate(
        torch.tensor([prompt]),
        max_length=positions,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found = list(Generator(ours, max_length=positions).stream(prompt, positions - len(prompt)))
    assert [*prompt, *found] == expected[0].tolist()
    assert len(set(found)) > 4


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(side: str, tmp_path: Path) -> None:
    theirs = random_gpt2()
    ours = imported(theirs, tmp_path)
    ids, real = torch.randint(VOCAB, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.long)
    for row, missing in enumerate((0, 5, 11)):
        real[row, slice(LENGTH - missing, LENGTH) if side == "right" else slice(0, missing)] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real, position_ids=positions).logits
        logits = ours(ids, positions=positions, padding_mask=real)
    assert error(logits[real.bool()], expected[real.bool()]) < 1e-4


def test_many_files_of_half_precision(tmp_path: Path) -> None:
    """Shards, and values that come along exactly: fp16 becomes fp32."""
    theirs = random_gpt2().half()
    ours = imported(theirs, tmp_path, max_shard_size="40KB")
    assert len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 1
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.no_grad():
        assert error(ours(ids), theirs.float()(ids).logits) < 1e-4


def test_a_bare_gpt2_model_has_no_prefix(tmp_path: Path) -> None:
    theirs = random_gpt2()
    ours = imported(theirs.transformer, tmp_path)
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.no_grad():
        assert error(ours(ids), theirs(ids).logits) < 1e-4


@pytest.mark.parametrize(
    ("change", "value"),
    [("activation_function", "gelu"), ("scale_attn_weights", False), ("layer_norm_epsilon", 1e-3)],
)
def test_the_comparison_sees_another_configuration(change: str, value: object, tmp_path: Path) -> None:
    theirs = random_gpt2()
    setattr(theirs.config, change, value)
    ours = imported(theirs, tmp_path)
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.no_grad():
        assert error(ours(ids), theirs(ids).logits) > 2e-4
