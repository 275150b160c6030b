"""Stock Hugging Face Llama folders: names, config.json and weights, both ways. transformers itself is not needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from llmstack.checkpoint.tensors import TensorFiles, require_tensors
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig, RopeScaling

Value = TypeVar("Value")

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_BLOCK_PARTS = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}
_OUR_BLOCK_PARTS = {theirs: ours for ours, theirs in _BLOCK_PARTS.items()}

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
_REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
# What transformers' LlamaConfig takes where config.json is silent (not the same as our own defaults).
_SILENT = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
_SILENT_THETA = 10000.0
_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def to_huggingface_names(weights: Mapping[str, Value], config: ModelConfig) -> dict[str, Value]:
    """The same values under the names of transformers' Llama.

    Raises:
        UserError: the model is none that transformers' Llama can compute (another norm, MLP, …).
    """
    _refuse_what_llama_lacks(config)
    return {_to_huggingface_name(name): value for name, value in weights.items()}


def from_huggingface_names(weights: Mapping[str, Value]) -> dict[str, Value]:
    """The same values under our names; derived tables that old files carry (``inv_freq``) are left out.

    Raises:
        UserError: a name that transformers' Llama does not have.
    """
    return {_from_huggingface_name(name): value for name, value in weights.items() if not _is_derived(name)}


def config_from_huggingface(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A Llama ``config.json`` of transformers 4 or 5 as a ``ModelConfig``.

    The rotary base stands at the top level (``rope_theta``) or in ``rope_parameters`` (transformers 5), the scaling in
    ``rope_scaling`` or ``rope_parameters``. Dropout of attention weights is training only and not taken over.

    Raises:
        UserError: something that this model cannot represent, or a missing size; ``where`` names the source.
    """
    _refuse_what_we_lack(values, where)
    ours = {name: values.get(theirs) for name, theirs in _FIELDS.items()}
    missing = [_FIELDS[name] for name in _REQUIRED if ours[name] is None]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} is missing")
    ours.update({name: value for name, value in _SILENT.items() if ours[name] is None})
    theta, scaling = _rope(values, where)
    return ModelConfig.from_dict({**ours, "rope_theta": theta, "rope_scaling": scaling}, where)


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` of transformers' Llama; base and scaling stand where version 4 and where version 5 looks.

    Raises:
        UserError: the model is none that transformers' Llama can compute.
    """
    _refuse_what_llama_lacks(config)
    values = {theirs: getattr(config, name) for name, theirs in _FIELDS.items()}
    values.update(num_key_value_heads=config.kv_heads, head_dim=config.head_size)
    scaling = {"rope_type": "llama3", **asdict(config.rope_scaling)} if config.rope_scaling else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **values,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
    }


def load_huggingface(folder: str | Path) -> tuple[ModelConfig, TensorFiles]:
    """Configuration and weights (under our names, read when asked for) of a stock Llama folder.

    Raises:
        UserError: no or other files, a model we cannot represent, or tensors that do not fit the configuration.
    """
    folder = Path(folder)
    config = config_from_huggingface(read_json(folder / "config.json"), str(folder / "config.json"))
    tensors = open_weights(folder)
    with torch.device("meta"):
        wanted = Llama(config).state_dict()
    names = {_to_huggingface_name(name): name for name in wanted}
    shapes = {name: shape for name, shape in tensors.shapes().items() if not _is_derived(name)}
    repeated = config.tie_word_embeddings and shapes.pop("lm_head.weight", None) is not None
    require_tensors({theirs: tuple(wanted[ours].shape) for theirs, ours in names.items()}, shapes, folder)
    if repeated:
        require_tied_head(tensors, "model.embed_tokens.weight", folder)
    return config, tensors.renamed({ours: theirs for theirs, ours in names.items()})


def open_weights(folder: Path) -> TensorFiles:
    """The tensors of a Hugging Face folder, of one file or of shards, under their stored names.

    Raises:
        UserError: there are none, a shard is missing or broken, or they would have to be unpickled.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return TensorFiles.of([folder / WEIGHTS_FILE])
    if (folder / INDEX_FILE).is_file():
        return _open_shards(folder)
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        raise UserError(
            f"{folder}: its weights ({pickles[0].name}) need unpickling, which can run code, and are refused; convert "
            "them to safetensors"
        )
    raise UserError(f"{folder}: no {WEIGHTS_FILE} and no {INDEX_FILE}")


def _open_shards(folder: Path) -> TensorFiles:
    index = folder / INDEX_FILE
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: no weight_map")
    files = sorted({str(file) for file in places.values()})
    for file in files:
        if Path(file).name != file:
            raise UserError(f"{index}: the file {file} lies outside the folder")
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing; {INDEX_FILE} lists it")
    tensors = TensorFiles.of(folder / file for file in files)
    absent = [name for name in places if name not in tensors]
    if absent:
        raise UserError(f"{folder / places[absent[0]]}: {absent[0]} is missing; {INDEX_FILE} lists it there")
    return tensors


def require_tied_head(tensors: TensorFiles, embedding: str, folder: Path) -> None:
    """A file may repeat the embedding as the head of a tied model; another matrix there would silently be dropped.

    Raises:
        UserError: ``lm_head.weight`` is not equal to the tensor called ``embedding``.
    """
    if not torch.equal(tensors["lm_head.weight"], tensors[embedding]):
        raise UserError(
            f"{folder}: config.json ties the head to the embedding, but lm_head.weight is another matrix; set "
            "tie_word_embeddings to what the model was trained with"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable as JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: no JSON object")
    return values


def _is_derived(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _to_huggingface_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "lm_head":
        return name
    if parts[0] == "layers":
        parts[2] = _BLOCK_PARTS[parts[2]]
    return ".".join(["model", *parts])


def _from_huggingface_name(name: str) -> str:
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[3] in _OUR_BLOCK_PARTS:
        return ".".join(["layers", parts[2], _OUR_BLOCK_PARTS[parts[3]], *parts[4:]])
    if parts[0] == "lm_head":
        return name
    if parts[0] == "model" and parts[1] in ("embed_tokens", "norm"):
        return ".".join(parts[1:])
    raise UserError(f"{name} is no tensor of a Hugging Face Llama")


def _rope(values: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling."""
    nested = [values.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    bases = {float(part["rope_theta"]) for part in (values, *nested) if part.get("rope_theta") is not None}
    if len(bases) > 1:
        raise UserError(f"{where}: two values of rope_theta ({', '.join(map(str, sorted(bases)))})")
    scalings = [scaling for part in nested if (scaling := _rope_scaling(part, where)) is not None]
    if any(scaling != scalings[0] for scaling in scalings):
        raise UserError(f"{where}: rope_scaling and rope_parameters differ")
    return (bases.pop() if bases else _SILENT_THETA), (scalings[0] if scalings else None)


def _rope_scaling(part: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = part.get("rope_type", part.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{where}: rotary scaling '{kind}' is not supported (llama3 is)")
    missing = [name for name in _SCALING_FIELDS if part.get(name) is None]
    if missing:
        raise UserError(f"{where}: the llama3 rotary scaling lacks {', '.join(missing)}")
    return RopeScaling(**{name: part[name] for name in _SCALING_FIELDS})


def _refuse_what_we_lack(values: Mapping[str, Any], where: str) -> None:
    rope = values.get("rope_parameters") or {}
    checks = [
        ("model_type", values.get("model_type"), ("llama",)),
        ("hidden_act", values.get("hidden_act", "silu"), ("silu", "swish")),
        ("pretraining_tp", values.get("pretraining_tp", 1), (1, None)),
        ("quantization_config", values.get("quantization_config"), (None,)),
        ("partial_rotary_factor", values.get("partial_rotary_factor", 1), (1, None)),
        ("rope_parameters.partial_rotary_factor", rope.get("partial_rotary_factor", 1), (1, None)),
    ]
    for name, value, supported in checks:
        if value not in supported:
            raise UserError(f"{where}: {name} is {json.dumps(value)}, which is not supported")


def _refuse_what_llama_lacks(config: ModelConfig) -> None:
    checks = {
        "norm.method": (config.norm.get("method"), "rmsnorm"),
        "positions": (config.positions, "rope"),
        "mlp": (config.mlp, "swiglu"),
        "lm_head_bias": (config.lm_head_bias, False),
        "residual": (config.residual, True),
        "score_scaling": (config.score_scaling, True),
    }
    for name, (value, needed) in checks.items():
        if value != needed:
            raise UserError(
                f"Hugging Face's Llama cannot represent this model: {name} is {json.dumps(value)}, "
                f"not {json.dumps(needed)}"
            )
