"""Speculative decoding: something cheap proposes tokens, the model checks several at a time.

A proposal x drawn from q is kept with probability min(1, p(x)/q(x)); else the id is drawn from max(0, p − q),
normalised. So what comes out has the model's own distribution p (Leviathan et al., arXiv 2211.17192, theorem in A.1;
Chen et al., arXiv 2302.01318). p and q are the distributions after everything that the request's sampling does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.inference.reading import decode_rows, read_texts
from llmstack.inference.runner import Runner
from llmstack.inference.sampling import Sampler, Sampling


@dataclass(frozen=True)
class Proposal:
    """What may follow in one row."""

    ids: list[int]
    probabilities: list[Tensor] | None
    """What each was drawn from, [vocab] fp64; none: they are certain."""

    def below(self, vocab_size: int) -> Proposal:
        """The same up to the first id that cannot be drawn (a prompt may have such)."""
        number = next((place for place, token in enumerate(self.ids) if token >= vocab_size), len(self.ids))
        return replace(self, ids=self.ids[:number])


@dataclass(frozen=True)
class Begun:
    """A row as a draft sees it."""

    ids: list[int]
    """Prompt and continuation."""
    sampling: Sampling
    limit: int
    """Most tokens that can be checked."""


class Draft(Protocol):
    """Proposes."""

    @property
    def tokens(self) -> int:
        """At most so many at a time."""

    def propose(self, rows: Mapping[int, Begun]) -> dict[int, Proposal]:
        """Proposals for ``rows`` (by their place in the batch), for some or none of them."""


@dataclass
class Acceptance:
    """How many proposals the model kept."""

    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float | None:
        """The share; none before the first proposal."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the last tokens where they stood before (Saxena, 2023, "Prompt Lookup Decoding")."""

    tokens: int = 4
    """At most so many at a time."""
    longest: int = 3
    """So many last tokens are looked for, then fewer."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.longest < 1:
            raise UserError(f"prompt lookup: {self.tokens} tokens after {self.longest}; both must be at least 1")

    def propose(self, rows: Mapping[int, Begun]) -> dict[int, Proposal]:
        """See :class:`Draft`."""
        found = {index: self._following(row.ids)[: row.limit] for index, row in rows.items()}
        return {index: Proposal(ids, None) for index, ids in found.items() if ids}

    def _following(self, ids: list[int]) -> list[int]:
        for length in range(min(self.longest, len(ids) - 1), 0, -1):
            last = ids[-length:]
            for start in range(len(ids) - length - 1, -1, -1):
                if ids[start : start + length] == last:
                    return ids[start + length : start + length + self.tokens]
        return []


class ModelDraft:
    """Proposes what a smaller model would say.

    Args:
        runner: of that model, with a row for each of the generator's.
        tokens: proposed at a time.
        vocab_size: ids below this are proposed.
        chunk: tokens of a prompt that are read at a time.
    """

    def __init__(self, runner: Runner, tokens: int, vocab_size: int, chunk: int) -> None:
        self.tokens = tokens
        self._runner, self._vocab_size, self._chunk = runner, vocab_size, chunk
        self._read: list[list[int]] = [[] for _ in range(runner.batch_size)]

    def warm_up(self) -> None:
        """Compile what proposing needs."""
        decode_rows(self._runner, {}, 1)

    def clear(self) -> None:
        """Forget everything."""
        self._runner.clear()
        self._read = [[] for _ in self._read]

    def propose(self, rows: Mapping[int, Begun]) -> dict[int, Proposal]:
        """See :class:`Draft`."""
        self._catch_up(rows)
        # Its draws are a function of seed and place, so that a row's do not depend on what else is in the batch.
        samplers = {
            index: Sampler(replace(row.sampling, seed=_mixed(row.sampling.seed, len(row.ids))), row.ids)
            for index, row in rows.items()
        }
        proposals: dict[int, Proposal] = {index: Proposal([], []) for index in rows}
        for place in range(self.tokens + 1):
            fed = {
                index: (len(row.ids) - 1 + place, [proposals[index].ids[-1] if place else row.ids[-1]])
                for index, row in rows.items()
                if place <= row.limit
            }
            if not fed:
                break
            logits = decode_rows(self._runner, fed, 1)[:, 0, : self._vocab_size]
            for index in fed:
                row, proposal = rows[index], proposals[index]
                if place < min(self.tokens, row.limit):  # the last proposal is only read
                    probabilities = samplers[index].probabilities(logits[index])
                    token = samplers[index].draw(probabilities)
                    samplers[index].said(token)
                    proposal.ids.append(token)
                    assert proposal.probabilities is not None
                    proposal.probabilities.append(probabilities)
        for index, row in rows.items():
            self._read[index] = row.ids + proposals[index].ids
        return {index: proposal for index, proposal in proposals.items() if proposal.ids}

    def _catch_up(self, rows: Mapping[int, Begun]) -> None:
        """Read what the draft has not read of each row, all but its last token: a prompt, or what was not its own."""
        for index, row in rows.items():
            known = common_length(self._read[index], row.ids[:-1])
            if known < len(row.ids) - 1:
                read_texts(self._runner, [index], [row.ids[:-1]], known, self._chunk)


def verified(sampler: Sampler, logits: Tensor, proposal: Proposal) -> Iterator[tuple[int, bool]]:
    """The ids that follow, in order: the proposals kept, then one of the model's own.

    Args:
        sampler: of the row.
        logits: [1 + proposals, vocab], what the model says at each place.
        proposal: for the row.

    Yields:
        an id, and whether it is a proposal that was kept.
    """
    for place, proposed in enumerate(proposal.ids):
        own = sampler.probabilities(logits[place])
        if proposal.probabilities is None:
            drawn_from = torch.zeros_like(own)
            drawn_from[proposed] = 1
        else:
            drawn_from = proposal.probabilities[place]
        if sampler.uniform() * drawn_from[proposed] < own[proposed]:
            sampler.said(proposed)
            yield proposed, True
            continue
        left = (own - drawn_from).clamp(min=0)
        token = sampler.draw(left if left.any() else own)  # the two were the same but for rounding
        sampler.said(token)
        yield token, False
        return
    yield sampler.sample(logits[len(proposal.ids)]), False


def common_length(first: list[int], second: list[int]) -> int:
    """Length of the longest common beginning."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


def _mixed(seed: int, place: int) -> int:
    """A seed of its own for each place, by a linear congruence (Knuth's MMIX constants)."""
    return (seed * 6364136223846793005 + place * 1442695040888963407 + 1) % 2**63
