"""From logits to the next id: greedy, or drawn after bias, penalty, temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmstack.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How one sequence chooses its next id. Applied in the order of the fields, which is that of transformers."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, kw_only=True)
    """Added to the logits of these ids; -inf: never."""
    repetition_penalty: float = field(default=1.0, kw_only=True)
    """Logits of ids that stand in the prompt or the continuation are divided by this where positive, multiplied where
    negative (Keskar et al., arXiv 1909.05858, section 4.1); 1: none."""
    temperature: float = 0.0
    """Logits are divided by this; 0: greedy, the largest logit (of equal ones the lowest id)."""
    top_k: int | None = None
    """Keep the k largest logits, and all that equal the k-th; null: all."""
    top_p: float | None = None
    """Keep the smallest set of the most probable ids that holds at least this probability; null or 1: all."""
    min_p: float | None = field(default=None, kw_only=True)
    """Keep ids at least this times as probable as the most probable (arXiv 2407.01082); null or 0: all."""
    seed: int = 0
    """Fixes the whole sequence of draws."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"sampling: temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"sampling: top_k is {self.top_k}; it must be at least 1 (leave it out to keep all ids)")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"sampling: min_p is {self.min_p}; it must be from 0 to 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UserError(
                f"sampling: repetition_penalty is {self.repetition_penalty}; it must be above 0 (1: no penalty)"
            )
        for token, bias in self.logit_bias.items():
            if not bias < math.inf:
                raise UserError(f"sampling: logit_bias of id {token} is {bias}; it must be a number, or -inf")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"sampling: seed is {self.seed}; it must be from 0 to 2^63 - 1")

    @property
    def follows_the_logits_alone(self) -> bool:
        """Whether the next id is that of the largest logit as the model gives it."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.logit_bias


class Sampler:
    """Draws the ids of one sequence.

    It uses one number of its own generator for each draw, so the ids depend on the logits and the :class:`Sampling`
    alone: not on other sequences of a batch, and not on the device, since the generator lives on the CPU. Sequences of
    one seed share their draws; give each its own for different continuations of one prompt.

    Args:
        sampling: how ids are chosen.
        prompt_ids: what a repetition penalty counts as said before the first draw.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int] = ()) -> None:
        self.sampling = sampling
        self._said = set(prompt_ids) if sampling.repetition_penalty != 1 else None
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def sample(self, logits: Tensor) -> int:
        """``logits`` [vocab] -> an id, which counts as said from now on.

        Raises:
            UserError: no finite largest logit, so there is no distribution.
        """
        refuse_damaged(logits)
        adjusted = self.adjusted(logits)
        if self.sampling.temperature == 0:
            token = int(adjusted.argmax())
        else:
            token = self.draw(filtered_logits(adjusted, self.sampling).softmax(-1))
        self.said(token)
        return token

    def probabilities(self, logits: Tensor) -> Tensor:
        """``logits`` [vocab] -> what :meth:`sample` would draw from, [vocab] fp64; greedy: one id has all."""
        refuse_damaged(logits)
        adjusted = self.adjusted(logits)
        if self.sampling.temperature > 0:
            return filtered_logits(adjusted, self.sampling).softmax(-1)
        one = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        one[adjusted.argmax()] = 1
        return one

    def draw(self, probabilities: Tensor) -> int:
        """One id by inverting the cumulative distribution of ``probabilities`` [vocab] fp64, which need not sum to 1.

        fp64, so that small tails are not lost.
        """
        cumulative = probabilities.cumsum(-1)
        # Right of equal values: an id of probability 0 repeats the sum before it and is never hit.
        return int(torch.searchsorted(cumulative, self.uniform() * cumulative[-1], right=True))

    def uniform(self) -> float:
        """A number of this sequence's own, in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def said(self, token: int) -> None:
        """Count ``token`` as part of the continuation."""
        if self._said is not None:
            self._said.add(token)

    def adjusted(self, logits: Tensor) -> Tensor:
        """``logits`` [vocab] after bias and penalty; the same tensor where there is neither."""
        # Ids that are never drawn (of an embedding larger than the vocabulary) may stand in a prompt or have a bias.
        bias = {token: added for token, added in self.sampling.logit_bias.items() if token < len(logits)}
        said = sorted(token for token in self._said or () if token < len(logits))
        if not bias and not said:
            return logits
        logits = logits.double().clone()
        if bias:
            added = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
            logits.index_add_(0, torch.tensor(list(bias), device=logits.device), added)
            if not torch.isfinite(logits.amax()):
                raise UserError("sampling: logit_bias leaves no id that can be drawn; it forbids them all")
        if said:
            ids = torch.tensor(said, device=logits.device)
            of_said, penalty = logits[ids], self.sampling.repetition_penalty
            logits[ids] = torch.where(of_said > 0, of_said / penalty, of_said * penalty)
        return logits


def refuse_damaged(logits: Tensor) -> None:
    """Whether each row of ``logits`` [..., vocab] has a finite largest value.

    Raises:
        UserError: it has not.
    """
    if not torch.isfinite(logits.amax(-1)).all():
        raise UserError("the model's logits are NaN or infinite: its weights are damaged or overflow their dtype")


def sample_rows(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next id of each row of ``logits`` [batch, vocab]; of rows that follow the logits alone at once."""
    if all(sampler.sampling.follows_the_logits_alone for sampler in samplers):
        refuse_damaged(logits)
        return logits.argmax(-1).tolist()
    return [sampler.sample(row) for row, sampler in zip(logits, samplers, strict=True)]


def filtered_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """``logits`` [..., vocab] -> logits at the temperature, -inf where top-k, top-p or min-p leaves an id out; fp64.

    Of equal logits at the edge of top-p the higher ids stay, as in transformers.
    """
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        smallest = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ascending, order = scaled.sort(stable=True)
        below = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        below[..., -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(below).scatter(-1, order, below), -torch.inf)
    if sampling.min_p:
        # The largest is 0 here, and of each other only the difference counts.
        scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), -torch.inf)
    return scaled
