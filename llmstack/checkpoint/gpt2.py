"""Hugging Face GPT-2 folders: config.json and weights as ours. transformers itself is not needed.

GPT-2 stores its linear maps as ``Conv1D``, [in, out], the transpose of ours, and queries, keys and values as one of
them, [hidden, 3·hidden]. So its tensors cannot be used as they lie: such a folder is converted, by ``import``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmstack.checkpoint.huggingface import open_weights, read_json, require_tied_head
from llmstack.checkpoint.tensors import TensorFiles, require_tensors
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "score_scaling": "scale_attn_weights",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
    "residual_dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
}
# What transformers' GPT2Config takes where config.json is silent.
_SILENT = {
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "activation_function": "gelu_new",
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_PARTS = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "attention_norm": "ln_1",
    "attention.q_proj": "attn.c_attn",
    "attention.k_proj": "attn.c_attn",
    "attention.v_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "norm": "ln_f",
    "lm_head": "lm_head",
}
_FUSED = ("q_proj", "k_proj", "v_proj")
_PREFIX = "transformer."
_OURS = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Constants of the attention that files of older versions carry."""


@dataclass(frozen=True)
class Gpt2Folder:
    """A GPT-2 on disk, in our terms. Its tensors are read when they are asked for."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor, under our names."""
    stored: TensorFiles
    """Under our names, each the tensor of GPT-2's that holds it."""
    attention_dropout: float
    """Dropout of attention weights in training, which our attention does not have."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor of ours, in memory of its own."""
        tensor = self.stored.read(name, dtype)
        third = _third(name)
        if third is not None:
            tensor = tensor.chunk(3, dim=-1)[third].clone()
        return tensor.T.contiguous() if _is_conv1d(name) else tensor


def is_gpt2(folder: Path) -> bool:
    """Whether the ``config.json`` of ``folder`` is a GPT-2's.

    Raises:
        UserError: it is no JSON object.
    """
    return read_json(folder / "config.json").get("model_type") == "gpt2"


def config_from_gpt2(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A GPT-2 ``config.json`` as a ``ModelConfig``.

    ``reorder_and_upcast_attn`` changes rounding in half precision alone and is ignored. Dropout of attention weights
    (``attn_pdrop``) is training only and not taken over.

    Raises:
        UserError: something that this model cannot represent; ``where`` names the source.
    """
    given = _with_defaults(values)
    _refuse_what_we_lack(given, where)
    ours = {name: given[theirs] for name, theirs in _FIELDS.items()}
    return ModelConfig.from_dict(
        {
            **ours,
            "intermediate_size": given.get("n_inner", 4 * given["n_embd"]),
            "norm": {"method": "layernorm"},
            "positions": "learned",
            "mlp": _ACTIVATIONS[given["activation_function"]],
            "attention_bias": True,
            "mlp_bias": True,
            "initialisation": "depth_scaled",
        },
        where,
    )


def load_gpt2(folder: str | Path) -> Gpt2Folder:
    """Configuration and weights of a GPT-2 folder; its keys may or may not begin with ``transformer.``.

    Raises:
        UserError: no or other files, a model we cannot represent, or tensors that do not fit the configuration.
    """
    folder = Path(folder)
    values = read_json(folder / "config.json")
    config = config_from_gpt2(values, str(folder / "config.json"))
    files = open_weights(folder)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in files) else ""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Llama(config).state_dict().items()}
    # The head stands beside the transformer, not in it.
    stored = {name: ("" if name.startswith("lm_head.") else prefix) + _their_name(name) for name in shapes}
    found = {
        name: shape for name, shape in files.shapes().items() if not _CAUSAL_MASK.fullmatch(name.removeprefix(prefix))
    }
    repeated = config.tie_word_embeddings and found.pop("lm_head.weight", None) is not None
    require_tensors({stored[name]: _their_shape(name, shape) for name, shape in shapes.items()}, found, folder)
    if repeated:
        require_tied_head(files, stored["embed_tokens.weight"], folder)
    return Gpt2Folder(config, shapes, files.renamed(stored), _with_defaults(values)["attn_pdrop"])


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**_SILENT, **{name: value for name, value in values.items() if value is not None}}


def _refuse_what_we_lack(values: Mapping[str, Any], where: str) -> None:
    checks: dict[str, tuple[Any, ...]] = {
        "activation_function": tuple(_ACTIVATIONS),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    }
    for name, supported in checks.items():
        if values.get(name) not in supported:
            known = ", ".join("none" if value is None else json.dumps(value) for value in supported)
            raise UserError(f"{where}: {name} is {json.dumps(values[name])}, which is not supported (only {known})")


def _their_name(name: str) -> str:
    """``layers.0.attention.q_proj.bias`` -> ``h.0.attn.c_attn.bias``."""
    match = _OURS.fullmatch(name)
    assert match is not None
    layer, part, kind = match.groups()
    return f"{'' if layer is None else f'h.{layer}.'}{_PARTS[part]}.{kind}"


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tensor of GPT-2's that holds ours called ``name``."""
    if _third(name) is not None:
        shape = (3 * shape[0], *shape[1:])
    return shape[::-1] if _is_conv1d(name) else shape


def _third(name: str) -> int | None:
    """Which third of the fused projection; none: a whole tensor."""
    part = name.split(".")[-2]
    return _FUSED.index(part) if part in _FUSED else None


def _is_conv1d(name: str) -> bool:
    """Whether GPT-2 stores the matrix as [in, out]."""
    return name.endswith("_proj.weight")
