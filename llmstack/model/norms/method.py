"""What a normalisation method is: the modules it puts into a model, and its life while the model trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig
    from llmstack.model.llama import Llama

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[object]]
"""Makes parameters whole inside its context, for reading: a strategy that shards them has its own."""


def whole(parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
    """The :data:`Gather` of a model that is not sharded."""
    return nullcontext()


@dataclass(frozen=True)
class NormMethod(ABC):
    """One method with its options (the fields of the subclass). It holds no state: modules and buffers do.

    A block calls its two sites so, and a method decides what stands there::

        u, carry = attention_norm(x)
        x = x + after_attention(attention(u))
        w = mlp_norm(x, carry)
        x = x + after_mlp(mlp(w))

    ``carry`` is whatever the second site may reuse of the first (a tensor, a tuple of tensors or None).
    """

    name: ClassVar[str]
    """Name in configurations."""
    uses_train_length: ClassVar[bool] = False
    """Whether an option ``train_length`` (tokens) has to follow the block length of the training data."""

    @abstractmethod
    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        """The first site of block ``layer`` (from 0): ``forward(x) -> (u, carry)``."""

    @abstractmethod
    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        """The second site: ``forward(x, carry) -> w``."""

    @abstractmethod
    def final_norm(self, config: ModelConfig) -> nn.Module:
        """Between the last block and the LM head: ``forward(x) -> x``."""

    def after_attention(self, config: ModelConfig, layer: int) -> nn.Module:
        """On the attention output, before the residual add."""
        return nn.Identity()

    def after_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """On the MLP output, before the residual add."""
        return nn.Identity()

    def after_embedding(self, config: ModelConfig) -> nn.Module:
        """On the embedding output."""
        return nn.Identity()

    def initialise(self, model: Llama, gather: Gather = whole) -> None:  # noqa: B027 - most methods have nothing to do
        """Called once the weights have been initialised: compute what depends on them (read within ``gather``)."""

    def after_step(self, model: Llama, step: int, max_steps: int, gather: Gather = whole) -> None:  # noqa: B027
        """Called on every rank after optimiser step ``step`` (from 1) of ``max_steps`` was really applied."""
