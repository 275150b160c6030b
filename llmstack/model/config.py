"""Everything that decides what a model computes. Field docstrings become the help of the command line."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import yaml

from llmstack.errors import UserError
from llmstack.model.norms.registry import NormMethod, build_norm_method
from llmstack.shipped import configs_folder, find_config


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling of the rotary embedding (Llama 3.1 release; see ``rope.py``)."""

    factor: float = 32.0
    """Low frequencies are divided by this."""
    low_freq_factor: float = 1.0
    """Wavelengths longer than original / this are scaled in full."""
    high_freq_factor: float = 4.0
    """Wavelengths shorter than original / this are left alone."""
    original_max_position_embeddings: int = 8192
    """Context length, in tokens, that the unscaled frequencies were trained for."""

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
            if not getattr(self, name) > 0:
                raise UserError(f"model config: rope_scaling.{name} is {getattr(self, name)}; it must be above 0")
        if not self.high_freq_factor > self.low_freq_factor:
            raise UserError(
                f"model config: rope_scaling.high_freq_factor is {self.high_freq_factor}; it must be above "
                f"low_freq_factor, {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only language model."""

    vocab_size: int | None = None
    """Number of token ids; null: the tokenizer's, padded to a multiple of 64."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of decoder blocks."""
    num_heads: int = 4
    """Query heads per block."""
    num_kv_heads: int | None = None
    """Key and value heads per block (grouped-query attention); null: as many as query heads; 1: multi-query."""
    head_dim: int | None = None
    """Width of one head; null: hidden_size / num_heads."""
    intermediate_size: int = 384
    """Width inside the MLP."""
    max_position_embeddings: int = 4096
    """Longest sequence in tokens."""
    norm: dict[str, Any] = field(default_factory=lambda: {"method": "rmsnorm"})
    """Normalisation: `method` and the options of that method (see configs/norm and llmstack/model/norms)."""
    rms_norm_eps: float = 1e-5
    """Epsilon under the square root of RMSNorm and LayerNorm."""
    positions: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    """Position information."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 frequency scaling; null: none."""
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    """MLP: gated by SiLU or GELU, or plain with GELU, its tanh approximation (as in GPT-2) or ReLU."""
    attention_bias: bool = False
    """Biases on the q, k, v and o projections."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    lm_head_bias: bool = False
    """Bias on the logits."""
    tie_word_embeddings: bool = True
    """Share the embedding matrix with the LM head."""
    residual: bool = True
    """Residual connections (off only for ablations)."""
    score_scaling: bool = True
    """Divide attention scores by sqrt(head_dim) (off only for ablations)."""
    initialisation: Literal["normal", "fan_in", "depth_scaled"] = "normal"
    """N(0, std); N(0, 1/fan_in) for matrices; or N(0, std) with std/sqrt(2 layers) on o_proj and down_proj."""
    initializer_range: float = 0.02
    """Standard deviation of the initialisation (of embeddings under fan_in, too)."""
    residual_dropout: float = 0.0
    """Dropout on each sub-layer's output before the residual add, at the last block."""
    residual_dropout_schedule: Literal["constant", "linear"] = "constant"
    """The same rate in every block, or linear in depth from 0 at the first to the full rate at the last."""
    embedding_dropout: float = 0.0
    """Dropout on the embedding output."""

    def __post_init__(self) -> None:
        _check_types(self)
        positive = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
        for name in (*positive, "vocab_size", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if (value is None and name in positive) or (value is not None and value < 1):
                raise UserError(f"model config: {name} is {value}; it must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise UserError(
                f"model config: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                "set head_dim or change one of them"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"model config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}"
            )
        if self.positions == "rope" and self.head_size % 2:
            raise UserError(f"model config: rotary positions need an even head_dim, not {self.head_size}")
        for name in ("residual_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model config: {name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"model config: {name} is {getattr(self, name)}; it must be above 0, and finite")
        _check_choices(self)
        build_norm_method(self.norm)

    @property
    def kv_heads(self) -> int:
        """Key and value heads per block."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def norm_method(self) -> NormMethod:
        """The normalisation method with its options."""
        return build_norm_method(self.norm)

    def dropout_rate(self, layer: int) -> float:
        """Residual dropout rate of block ``layer`` (from 0); linear: p·l/(L-1), LIMA (arXiv 2305.11206)."""
        if self.residual_dropout_schedule == "constant":
            return self.residual_dropout
        return self.residual_dropout * layer / max(self.num_layers - 1, 1)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "model config") -> ModelConfig:
        """From plain values.

        Raises:
            UserError: an unknown field or a bad value; ``where`` names the source.
        """
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise UserError(f"{where}: unknown model option {', '.join(unknown)}")
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            unknown = sorted(set(scaling) - {f.name for f in fields(RopeScaling)})
            if unknown:
                raise UserError(f"{where}: unknown option {', '.join(unknown)} of rope_scaling")
            values = {**values, "rope_scaling": RopeScaling(**scaling)}
        return cls(**values)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelConfig:
        """The size ``name`` (``tiny``, ``30m``, ``374m``, ``1b``, ``3b``) of ``configs/model``, with overrides.

        Raises:
            UserError: no such preset; the message lists them.
        """
        if not (configs_folder() / "model" / f"{name}.yaml").is_file():
            known = ", ".join(sorted(path.stem for path in (configs_folder() / "model").glob("*.yaml")))
            raise UserError(f"no model preset '{name}' (there are: {known})")
        path = find_config(f"model/{name}.yaml")
        values = yaml.safe_load(path.read_text())["model"]["config"]
        return replace(cls.from_dict(values, str(path)), **overrides)


def _check_types(config: ModelConfig) -> None:
    """Numbers are numbers and switches switches: a configuration file from elsewhere may hold anything."""
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "int | None": (int, type(None)),
        "float": (int, float),
    }
    for item in fields(config):
        value, wanted = getattr(config, item.name), kinds.get(str(item.type))
        if item.type == "bool" and not isinstance(value, bool):
            raise UserError(f"model config: {item.name} is {value!r}; it must be true or false")
        if wanted is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
            number = "a number" if float in wanted else "a whole number"
            raise UserError(f"model config: {item.name} is {value!r}; it must be {number}")
    if not isinstance(config.rope_scaling, RopeScaling | None):
        raise UserError(f"model config: rope_scaling is {config.rope_scaling!r}; it must be a mapping, or null")


def _check_choices(config: ModelConfig) -> None:
    choices = {
        "positions": ("rope", "learned", "sinusoidal", "none"),
        "mlp": ("swiglu", "geglu", "gelu", "gelu_tanh", "relu"),
        "initialisation": ("normal", "fan_in", "depth_scaled"),
        "residual_dropout_schedule": ("constant", "linear"),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise UserError(
                f"model config: {name} is '{getattr(config, name)}'; it must be one of {', '.join(allowed)}"
            )
