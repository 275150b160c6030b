"""One method for layers a to b, another for the rest: any mixture of the registry's methods.

    layers:
      0-3: {method: post_ln}
      12-: {method: bhyt, lambda_attention: 3.0}     from layer 12 to the top
    otherwise: {method: lns}

Layers count from 0, as in the names of the parameters; both ends of a range belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

from llmstack.errors import UserError
from llmstack.model.norms.layer_ranges import parse_layers, select_layers
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.mixture import Mixture

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


@dataclass(frozen=True)
class ByLayer(Mixture):
    """Methods by range of layers, a mapping of mappings, so that configurations compose without lists.

    What sits on the embedding is decided by the method of the first block, the final norm by that of the last.
    """

    name: ClassVar[str] = "by_layer"
    uses_train_length: ClassVar[bool] = True

    layers: dict[str, Any] | None = None
    """Range of layers (`0-3`, `"7"`, `12-`; from 0, both ends included) -> `method` and its options."""
    otherwise: dict[str, Any] | None = None
    """`method` and its options in all other layers; null: rmsnorm."""
    train_length: int | None = None
    """For each method that has this option and does not say otherwise."""

    def __post_init__(self) -> None:
        for layers in self.layers or {}:
            if not isinstance(layers, str):
                # As a number it would come back from a checkpoint's JSON as text: another configuration.
                raise UserError(f'norm by_layer: layers has the key {layers!r}; write it as text: "{layers}"')
            parse_layers(layers, "norm by_layer: layers")
        assert self._rest
        assert self._parts is not None

    @cached_property
    def _parts(self) -> dict[str, NormMethod]:
        return {layers: self._build(options, f"layers {layers}") for layers, options in (self.layers or {}).items()}

    @cached_property
    def _rest(self) -> NormMethod:
        return self._build({"method": "rmsnorm"} if self.otherwise is None else self.otherwise, "otherwise")

    def _build(self, options: Any, where: str) -> NormMethod:
        # The registry knows this method, too.
        from llmstack.model.norms.registry import build_norm_method

        if not isinstance(options, dict):
            raise UserError(f"norm by_layer: {where} is {options!r}; it must be a mapping with `method`")
        method = build_norm_method(options)
        if method.uses_train_length and options.get("train_length") is None:
            method = build_norm_method({**options, "train_length": self.train_length})
        return method

    def in_layer(self, config: ModelConfig, layer: int) -> NormMethod:
        for layers, method in self._parts.items():
            if layer in select_layers(layers, config.num_layers, "norm by_layer: layers"):
                return method.in_layer(config, layer)
        return self._rest.in_layer(config, layer)

    def check(self, config: ModelConfig) -> None:
        selected = {text: select_layers(text, config.num_layers, "norm by_layer: layers") for text in self._parts}
        for one, other in combinations(selected, 2):
            if shared := selected[one] & selected[other]:
                raise UserError(f"norm by_layer: layer {min(shared)} is in '{one}' and in '{other}'")
        for method in (*self._parts.values(), self._rest):
            method.check(config)
