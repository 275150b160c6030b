"""What a normalisation method is: the modules it puts into a model, and its life while the model trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig
    from llmstack.model.llama import Block, Llama
    from llmstack.model.norms.scale_anchor import ScaleAnchor

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[object]]
"""Makes parameters whole inside its context, for reading: a strategy that shards them has its own."""


NOTHING: Mapping[str, Tensor] = {}


def whole(parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
    """The :data:`Gather` of a model that is not sharded."""
    return nullcontext()


Observed = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""A module, and what of its input [batch, seq, hidden] is measured: sums over the tokens, a vector of any length."""


@dataclass(frozen=True)
class NormMethod(ABC):
    """One method with its options (the fields of the subclass). It holds no state: modules and buffers do.

    A block calls its two sites so, and a method decides what stands there::

        u, carry = attention_norm(x)
        x = x + after_attention(attention(u))
        w = mlp_norm(x, carry)
        x = x + after_mlp(mlp(w))

    ``u`` may be a pair, one for queries and keys, the other for values.
    ``carry`` is whatever the second site may reuse of the first (a tensor, a tuple of tensors or None).

    Where :meth:`residual_scale` gives an α, the norms act on the sum instead, and both sites are ``forward(x) -> x``::

        x = attention_norm(α·x + after_attention(attention(x)))
        x = mlp_norm(α·x + after_mlp(mlp(x)))
    """

    name: ClassVar[str]
    """Name in configurations."""
    uses_train_length: ClassVar[bool] = False
    """Whether an option ``train_length`` (tokens) has to follow the block length of the training data."""

    @property
    def takes_over(self) -> frozenset[str]:
        """Names of the methods whose trained weights this one can start from, besides its own."""
        return frozenset()

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

    def residual_scale(self, config: ModelConfig) -> float | None:
        """α of blocks whose norms act on the sum; none: the norms act on what a sub-layer reads."""
        return None

    def folds(self, config: ModelConfig) -> bool:
        """Whether the sites can be folded: not where norms act on the sum, whose γ the residual stream keeps, too.

        Then each site that has gains says by ``folded()`` (``folded.py``) what the matrices behind it take over.
        """
        return self.residual_scale(config) is None

    def in_layer(self, config: ModelConfig, layer: int) -> NormMethod:
        """The method of block ``layer`` (from 0): this one, unless it is a mixture of others."""
        return self

    def check(self, config: ModelConfig) -> None:  # noqa: B027 - most methods fit every architecture
        """Whether the options fit the architecture.

        Raises:
            UserError: they do not (layers that the model has not, for one).
        """

    def weight_std(self, config: ModelConfig, name: str, module: nn.Module) -> float | None:
        """Initial standard deviation of the matrix of ``module``, called ``name`` within the decoder.

        None: what the architecture's own options say.
        """
        return None

    def decayed(self, config: ModelConfig, name: str, parameter: Tensor) -> bool:
        """Whether weight decay applies to ``parameter``, called ``name`` within the decoder: to matrices only.

        ZeRO-3 leaves an empty shard in a parameter's place, and its shape beside it.
        """
        return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2

    def blocks(self, model: Llama) -> list[Block]:
        """The blocks of ``model`` that this method stands in: all of them, unless it is part of a mixture."""
        own = [block for block in model.blocks if block.norm_method == self]
        assert own, f"the model was built with {model.config.norm_method}, not with {self}"
        return own

    def scale_anchor(self, config: ModelConfig) -> ScaleAnchor | None:
        """Keeps the scale of what the head reads, where no final norm does; it has a loss of its own."""
        return None

    def initialise(self, model: Llama, gather: Gather = whole) -> None:  # noqa: B027 - most methods have nothing to do
        """Called once the weights have been initialised: compute what depends on them (read within ``gather``)."""

    def observed(self, model: Llama, step: int, max_steps: int) -> dict[str, Observed]:
        """What optimiser step ``step`` (from 1) of ``max_steps`` needs to know of its samples, by name.

        The training loop measures it in an eager forward of its own, before the step and with its weights.
        """
        return {}

    def after_step(  # noqa: B027
        self, model: Llama, step: int, max_steps: int, gather: Gather = whole, sums: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Called on every rank after optimiser step ``step`` (from 1) of ``max_steps`` was really applied.

        Args:
            model: with the weights after the step.
            step: the step just made.
            max_steps: steps of the whole run.
            gather: makes parameters whole for reading.
            sums: what was :meth:`observed`, summed over the samples of the step, all ranks and micro-batches.
        """

    def settle(self, model: Llama) -> None:  # noqa: B027
        """Called when buffers were read from a checkpoint: set what follows from them and is no tensor."""

    def check_decoding(self, model: Llama) -> None:  # noqa: B027
        """Whether the model can be run token by token.

        Raises:
            UserError: what a norm does depends on where in the sequence a token stands.
        """
