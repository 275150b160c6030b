"""Number of parameters of a model, by part."""

from dataclasses import asdict, dataclass, fields

import torch

from llmstack.model import Llama, ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. A tied matrix is one parameter: it counts as embedding, and the head has none."""

    embedding: int
    """Token embedding."""
    positions: int
    """Learned position embedding."""
    attention: int
    """q, k, v and o projections of all blocks."""
    mlp: int
    """MLPs of all blocks."""
    norms: int
    """Everything else: gains, biases and other parameters (λ) of all norms."""
    head: int
    """LM head: its own matrix where it is not tied, and its bias."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, field.name) for field in fields(self))

    def to_dict(self) -> dict[str, int]:
        """The parts and their ``total``."""
        return {**asdict(self), "total": self.total}


def count_parameters(model: Llama | ModelConfig) -> ParameterCount:
    """Parameters by part of a model, or of the model that a configuration describes (which takes no memory)."""
    if isinstance(model, ModelConfig):
        with torch.device("meta"):
            model = Llama(model)
    counts = dict.fromkeys((field.name for field in fields(ParameterCount)), 0)
    for name, parameter in model.named_parameters():
        counts[_part(name)] += parameter.numel()
    return ParameterCount(**counts)


def _part(name: str) -> str:
    owners = {"embed_tokens": "embedding", "embed_positions": "positions", "lm_head": "head"}
    top, *inner = name.split(".")
    if top == "layers" and inner[1] in ("attention", "mlp"):
        return inner[1]
    return owners.get(top, "norms")
