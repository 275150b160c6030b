"""What mixtures of norm methods have in common: each block, and what belongs to it, follows its own method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from llmstack.model.norms.method import NOTHING, Gather, NormMethod, Observed, whole

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig
    from llmstack.model.llama import Llama
    from llmstack.model.norms.scale_anchor import ScaleAnchor


class Mixture(NormMethod):
    """A method that only says which one stands in which layer.

    What sits on the embedding is decided by the method of the first block, the final norm by that of the last.
    """

    @abstractmethod
    def in_layer(self, config: ModelConfig, layer: int) -> NormMethod:
        """The method of block ``layer`` (from 0), itself no mixture."""

    def parts(self, config: ModelConfig) -> list[NormMethod]:
        """The methods that stand somewhere, each once."""
        return list(dict.fromkeys(self.in_layer(config, layer) for layer in range(config.num_layers)))

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return self.in_layer(config, layer).attention_norm(config, layer)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return self.in_layer(config, layer).mlp_norm(config, layer)

    def after_embedding(self, config: ModelConfig) -> nn.Module:
        return self.in_layer(config, 0).after_embedding(config)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return self.in_layer(config, config.num_layers - 1).final_norm(config)

    def scale_anchor(self, config: ModelConfig) -> ScaleAnchor | None:
        return self.in_layer(config, config.num_layers - 1).scale_anchor(config)

    def after_attention(self, config: ModelConfig, layer: int) -> nn.Module:
        return self.in_layer(config, layer).after_attention(config, layer)

    def after_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        return self.in_layer(config, layer).after_mlp(config, layer)

    def weight_std(self, config: ModelConfig, name: str, module: nn.Module) -> float | None:
        return self._owner(config, name).weight_std(config, name, module)

    def decayed(self, config: ModelConfig, name: str, parameter: Tensor) -> bool:
        return self._owner(config, name).decayed(config, name, parameter)

    def initialise(self, model: Llama, gather: Gather = whole) -> None:
        """Of every part, for its own blocks."""
        for part in self.parts(model.config):
            part.initialise(model, gather)

    def observed(self, model: Llama, step: int, max_steps: int) -> dict[str, Observed]:
        """Of every part; names are those of modules, so they do not meet."""
        return {
            name: wish
            for part in self.parts(model.config)
            for name, wish in part.observed(model, step, max_steps).items()
        }

    def after_step(
        self, model: Llama, step: int, max_steps: int, gather: Gather = whole, sums: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Of every part, for its own blocks."""
        for part in self.parts(model.config):
            part.after_step(model, step, max_steps, gather, sums)

    def settle(self, model: Llama) -> None:
        """Of every part, for its own blocks."""
        for part in self.parts(model.config):
            part.settle(model)

    def check_decoding(self, model: Llama) -> None:
        """Of every part."""
        for part in self.parts(model.config):
            part.check_decoding(model)

    def _owner(self, config: ModelConfig, name: str) -> NormMethod:
        """Whose rules hold for ``name``: the embedding follows the first block, final norm and head the last."""
        top, *inner = name.split(".")
        if top == "layers":
            return self.in_layer(config, int(inner[0]))
        return self.in_layer(config, config.num_layers - 1 if top in ("norm", "lm_head") else 0)
