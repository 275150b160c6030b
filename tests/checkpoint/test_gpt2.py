"""Hugging Face GPT-2 folders: config.json, the layout of the tensors bit for bit, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmstack.checkpoint import import_checkpoint, load_model, resolve
from llmstack.checkpoint.gpt2 import config_from_gpt2
from llmstack.errors import UserError
from llmstack.model import Llama

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_positions": 20,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 10,
}


def random_tensors(prefix: str = "transformer.", head: bool = False) -> dict[str, Tensor]:
    """Under GPT-2's names, in the shapes of its own code: [in, out] matrices of the linear maps."""
    torch.manual_seed(0)
    tensors = {"wte.weight": torch.randn(61, 12), "wpe.weight": torch.randn(20, 12)}
    tensors |= {"ln_f.weight": torch.randn(12), "ln_f.bias": torch.randn(12)}
    maps = {"attn.c_attn": (12, 36), "attn.c_proj": (12, 12), "mlp.c_fc": (12, 10), "mlp.c_proj": (10, 12)}
    for layer in range(2):
        for norm in ("ln_1", "ln_2"):
            tensors |= {f"h.{layer}.{norm}.{kind}": torch.randn(12) for kind in ("weight", "bias")}
        for name, shape in maps.items():
            tensors[f"h.{layer}.{name}.weight"] = torch.randn(shape)
            tensors[f"h.{layer}.{name}.bias"] = torch.randn(shape[1])
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    return {**tensors, "lm_head.weight": torch.randn(61, 12)} if head else tensors


def causal_masks(prefix: str) -> dict[str, Tensor]:
    masks = {f"{prefix}h.{layer}.attn.bias": torch.ones(20, 20).tril()[None, None].bool() for layer in range(2)}
    return masks | {f"{prefix}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(tensors, **config)`` -> a GPT-2 folder of these."""

    def write(tensors: dict[str, Tensor], **config: Any) -> Path:
        path = tmp_path / "gpt2"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
        save_file(tensors, path / "model.safetensors")
        return path

    return write


def imported(path: Path) -> Llama:
    import_checkpoint(path, path.parent / "ours")
    return load_model(path.parent / "ours")


def refusal(path: Path) -> str:
    """The one line of an import that leaves nothing behind."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(UserError) as error:
        import_checkpoint(path, path.parent / "ours", trust=True)
    assert "\n" not in str(error.value)
    assert sorted(path.parent.rglob("*")) == before
    return str(error.value)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_arrives_where_it_belongs(folder, prefix: str, tied: bool) -> None:
    theirs = random_tensors(prefix, head=not tied)
    found = imported(folder({**theirs, **causal_masks(prefix)}, tie_word_embeddings=tied))
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    expected = {"embed_tokens.weight": tensors["wte.weight"], "embed_positions.weight": tensors["wpe.weight"]}
    expected |= {"norm.weight": tensors["ln_f.weight"], "norm.bias": tensors["ln_f.bias"]}
    if not tied:
        expected["lm_head.weight"] = tensors["lm_head.weight"]
    for layer in range(2):
        ours, block = f"layers.{layer}", {n[4:]: t for n, t in tensors.items() if n.startswith(f"h.{layer}.")}
        for kind in ("weight", "bias"):
            expected[f"{ours}.attention_norm.{kind}"] = block[f"ln_1.{kind}"]
            expected[f"{ours}.mlp_norm.{kind}"] = block[f"ln_2.{kind}"]
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            third = slice(12 * index, 12 * (index + 1))
            expected[f"{ours}.attention.{part}.weight"] = block["attn.c_attn.weight"][:, third].T
            expected[f"{ours}.attention.{part}.bias"] = block["attn.c_attn.bias"][third]
        for name, part in (
            ("attention.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        ):
            expected[f"{ours}.{name}.weight"] = block[f"{part}.weight"].T
            expected[f"{ours}.{name}.bias"] = block[f"{part}.bias"]
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert (found.lm_head.weight is found.embed_tokens.weight) == tied


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_repeated_head_of_a_tied_model_is_dropped_and_another_is_refused(folder, prefix: str) -> None:
    tensors = random_tensors(prefix)
    tensors["lm_head.weight"] = tensors[f"{prefix}wte.weight"].clone()
    tensors["lm_head.weight"][0, 0] += 1
    assert "lm_head.weight is another matrix" in refusal(folder(tensors))
    tensors["lm_head.weight"][0, 0] = tensors[f"{prefix}wte.weight"][0, 0]
    assert "lm_head.weight" not in imported(folder(tensors)).state_dict()


def test_silent_config_means_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.GPT2Config(), config_from_gpt2({"model_type": "gpt2"})
    assert ours.vocab_size == theirs.vocab_size == 50257
    assert (ours.hidden_size, ours.num_layers, ours.num_heads) == (theirs.n_embd, theirs.n_layer, theirs.n_head)
    assert ours.kv_heads == theirs.n_head
    assert (theirs.n_inner, ours.intermediate_size) == (None, 4 * theirs.n_embd)
    assert ours.max_position_embeddings == theirs.n_positions
    assert ours.rms_norm_eps == theirs.layer_norm_epsilon
    assert ours.initializer_range == theirs.initializer_range
    assert (ours.residual_dropout, ours.embedding_dropout) == (theirs.resid_pdrop, theirs.embd_pdrop)
    assert (ours.tie_word_embeddings, ours.score_scaling) == (theirs.tie_word_embeddings, theirs.scale_attn_weights)
    assert (theirs.activation_function, ours.mlp) == ("gelu_new", "gelu_tanh")


def test_null_means_silent() -> None:
    silent = config_from_gpt2({"model_type": "gpt2"})
    nulls = ("n_inner", "tie_word_embeddings", "activation_function", "layer_norm_epsilon", "quantization_config")
    assert config_from_gpt2({"model_type": "gpt2", **dict.fromkeys(nulls)}) == silent


def test_fields_that_were_set() -> None:
    values = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "layer_norm_epsilon": 1e-3, "initializer_range": 0.1}
    config = config_from_gpt2({**CONFIG, **values, "scale_attn_weights": False, "tie_word_embeddings": False})
    assert (config.residual_dropout, config.embedding_dropout) == (0.3, 0.2)
    assert (config.rms_norm_eps, config.initializer_range) == (1e-3, 0.1)
    assert (config.score_scaling, config.tie_word_embeddings) == (False, False)
    assert (config.norm, config.positions) == ({"method": "layernorm"}, "learned")
    assert config.attention_bias
    assert config.mlp_bias
    assert not config.lm_head_bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true, which is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention is true, which is not supported"),
        ({"activation_function": "silu"}, 'activation_function is "silu", which is not supported (only "gelu", '),
        ({"activation_function": "quick_gelu"}, 'activation_function is "quick_gelu"'),
        ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}'),
        ({"n_head": 5}, "hidden_size 12 is not a multiple of num_heads 5"),
        ({"n_layer": "two"}, "num_layers is 'two'; it must be a whole number"),
        ({"resid_pdrop": 1.5}, "residual_dropout is 1.5"),
        ({"scale_attn_weights": "no"}, "score_scaling is 'no'"),
    ],
)
def test_what_cannot_be_represented_is_refused(folder, change: dict[str, Any], message: str) -> None:
    assert message in refusal(folder(random_tensors(), **change))


def test_missing_extra_and_reshaped_tensors_are_named_as_they_are_stored(folder) -> None:
    tensors = random_tensors(head=True)
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(36, 12)
    tensors["multiple_choice_head.summary.weight"] = torch.zeros(1, 12)
    message = refusal(folder(tensors, tie_word_embeddings=False))
    assert "missing transformer.h.1.mlp.c_fc.bias;" in message
    assert "not in this model multiple_choice_head.summary.weight;" in message
    assert "other shape: transformer.h.0.attn.c_attn.weight [36, 12] instead of [12, 36]" in message
    assert "missing lm_head.weight" in refusal(folder(random_tensors(), tie_word_embeddings=False))
    assert "missing transformer.wte.weight" in refusal(
        folder({"transformer.ln_f.bias": torch.ones(12), "lm_head.weight": torch.ones(61, 12)})
    )
    # Padded rows that the configuration does not know of.
    assert "transformer.wte.weight [61, 12] instead of [64, 12]" in refusal(folder(random_tensors(), vocab_size=64))


def test_shards_equal_the_single_file(folder) -> None:
    tensors = random_tensors()
    path = folder(tensors)
    whole = imported(path).state_dict()
    (path / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    import_checkpoint(path, path.parent / "sharded")
    sharded = load_file(path.parent / "sharded" / "model.safetensors")
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in sharded.items())
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=re.escape("model-00002-of-00002.safetensors is missing")):
        import_checkpoint(path, path.parent / "broken")


def test_pickled_weights_are_refused_even_if_trusted(folder) -> None:
    path = folder(random_tensors())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "(pytorch_model.bin) need unpickling, which can run code, and are refused; convert" in refusal(path)
    (path / "pytorch_model.bin").unlink()
    assert "no model.safetensors and no" in refusal(path)


@pytest.mark.parametrize("read", [resolve, load_model])
def test_as_a_checkpoint_the_folder_is_refused_with_what_to_do(folder, read: Callable[[Path], object]) -> None:
    path = folder(random_tensors())
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value) == (
        f"{path} is a Hugging Face GPT-2 folder, which has to be converted: run llmstack import {path} --out DIR, "
        "and use DIR"
    )
