"""Hugging Face Llama folders: names, config.json as transformers writes and reads it, weights bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmstack.checkpoint import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface_names,
    load_huggingface,
    to_huggingface_names,
)
from llmstack.errors import UserError
from llmstack.model import ModelConfig, RopeScaling

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BASE = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture
def stories(shared: Path) -> Path:
    return shared / "checkpoints" / "stories260K" / "hf"


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_real_checkpoint_round_trips_bit_equal(stories):
    config, weights = load_huggingface(stories)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (5, 8, 4, 512)
    assert config.rms_norm_eps == 1e-5
    original = load_file(stories / "model.safetensors")
    back = to_huggingface_names(weights, config)
    assert set(back) == set(original)
    for name, tensor in original.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name
    assert set(from_huggingface_names(original)) == set(weights)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_of_the_model_has_a_name_and_returns(build, tied, tmp_path):
    model = build(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, positions="rope")
    weights = model.state_dict()
    theirs = to_huggingface_names(weights, model.config)
    assert theirs["model.layers.1.post_attention_layernorm.weight"] is weights["layers.1.mlp_norm.weight"]
    assert theirs["model.layers.1.self_attn.o_proj.bias"] is weights["layers.1.attention.o_proj.bias"]
    assert from_huggingface_names(theirs) == weights
    config, read = load_huggingface(write_folder(tmp_path / "hf", config_to_huggingface(model.config), theirs))
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert (config.kv_heads, config.head_size, config.tie_word_embeddings) == (2, 8, tied)


def test_names_are_those_of_transformers(build):
    transformers = pytest.importorskip("transformers")
    model = build(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    config = transformers.LlamaConfig.from_dict(config_to_huggingface(model.config))
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config).state_dict()
    ours = to_huggingface_names(model.state_dict(), model.config)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}


@pytest.mark.parametrize("scaling", [None, RopeScaling(), RopeScaling(factor=8.0)])
def test_transformers_reads_our_config_and_we_read_its(build, scaling):
    """Version 5 nests base and scaling and drops the top-level base, which a reader that expects it takes for 10000."""
    transformers = pytest.importorskip("transformers")
    config = build(rope_theta=500000.0, rope_scaling=scaling, max_position_embeddings=131072).config
    theirs = transformers.LlamaConfig.from_dict(config_to_huggingface(config))
    assert theirs.rope_parameters["rope_theta"] == 500000.0
    assert theirs.rope_parameters["rope_type"] == ("llama3" if scaling else "default")
    if scaling:
        assert theirs.rope_parameters["factor"] == scaling.factor
    written = json.loads(theirs.to_json_string())
    assert "rope_theta" not in written
    read = config_from_huggingface(written)
    assert (read.rope_theta, read.rope_scaling) == (500000.0, scaling)
    for name in (
        "hidden_size",
        "num_layers",
        "num_heads",
        "kv_heads",
        "head_size",
        "intermediate_size",
        "rms_norm_eps",
    ):
        assert getattr(read, name) == getattr(config, name), name


def test_older_readers_find_base_and_scaling_at_the_top():
    config = ModelConfig(vocab_size=8, rope_theta=500000.0, rope_scaling=RopeScaling())
    values = config_to_huggingface(config)
    assert values["rope_theta"] == 500000.0
    assert values["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_scaling": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ],
)
def test_every_spelling_of_llama3_scaling(rope):
    config = config_from_huggingface({**BASE, **rope})
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling())


def test_silent_config_means_what_transformers_takes():
    transformers = pytest.importorskip("transformers")
    sizes = {
        name: BASE[name] for name in BASE if name.endswith("size") or name.startswith("num_") or name == "model_type"
    }
    del sizes["num_key_value_heads"]
    theirs, ours = transformers.LlamaConfig.from_dict(sizes), config_from_huggingface(sizes)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    for name in ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "attention_bias", "mlp_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, 'model_type is "mistral"'),
        ({"model_type": None}, "model_type is null"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "two values of rope_theta"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": 5}, "not a multiple"),
    ],
)
def test_what_cannot_be_represented_is_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        config_from_huggingface({**BASE, **change}, "here/config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"method": method} for method in ("layernorm", "bhyt", "bhyt_star")),
        {"positions": "learned"},
        {"mlp": "geglu"},
        {"lm_head_bias": True},
        {"residual": False},
        {"score_scaling": False},
    ],
)
def test_models_that_are_no_llama_do_not_get_its_names(build, options):
    model = build(**options)
    with pytest.raises(UserError, match="cannot represent this model"):
        to_huggingface_names(model.state_dict(), model.config)
    with pytest.raises(UserError, match="cannot represent this model"):
        config_to_huggingface(model.config)


def shard(stories: Path, folder: Path) -> dict[str, str]:
    folder.mkdir()
    shutil.copy(stories / "config.json", folder)
    weights = load_file(stories / "model.safetensors")
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_sharded_folder_equals_the_single_file(stories, tmp_path):
    shard(stories, tmp_path / "sharded")
    (_, whole), (_, sharded) = load_huggingface(stories), load_huggingface(tmp_path / "sharded")
    assert set(whole) == set(sharded)
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_broken_shards_are_named(stories, tmp_path):
    places = shard(stories, tmp_path / "sharded")
    first = tmp_path / "sharded" / places["model.norm.weight"]
    content = first.read_bytes()
    first.write_bytes(content[:-8])
    with pytest.raises(UserError, match=re.escape(f"{first}: not readable as safetensors")):
        load_huggingface(tmp_path / "sharded")
    first.unlink()
    with pytest.raises(UserError, match=re.escape(f"{first} is missing")):
        load_huggingface(tmp_path / "sharded")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(UserError, match="outside the folder"):
        load_huggingface(tmp_path / "sharded")


def test_missing_extra_and_reshaped_tensors_are_named(stories, tmp_path):
    config = json.loads((stories / "config.json").read_text())
    weights = load_file(stories / "model.safetensors")
    del weights["model.layers.2.self_attn.k_proj.weight"]
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    weights["model.norm.weight"] = torch.ones(65)
    with pytest.raises(UserError) as error:
        load_huggingface(write_folder(tmp_path / "hf", config, weights))
    message = str(error.value)
    assert "missing model.layers.2.self_attn.k_proj.weight" in message
    assert "not in this model model.layers.0.self_attn.q_norm.weight" in message
    assert "other shape: model.norm.weight [65] instead of [64]" in message
    assert "\n" not in message


def test_old_rotary_tables_and_a_repeated_head_are_ignored_but_another_head_is_not(stories, tmp_path):
    config = json.loads((stories / "config.json").read_text())
    weights = load_file(stories / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    _, read = load_huggingface(write_folder(tmp_path / "hf", config, weights))
    assert set(read) == set(load_huggingface(stories)[1])
    weights["lm_head.weight"][0, 0] += 1
    with pytest.raises(UserError, match=r"lm_head.weight is another matrix"):
        load_huggingface(write_folder(tmp_path / "hf", config, weights))


def test_pickled_weights_are_refused(stories, tmp_path):
    shutil.copy(stories / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"no model\.safetensors and no"):
        load_huggingface(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="need unpickling, which can run code, and are refused"):
        load_huggingface(tmp_path)
