"""What is asked of a generator, and what it answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from llmstack.errors import UserError
from llmstack.inference.sampling import Sampling

Finish = Literal["stop", "length"]
"""Why a continuation ended: a stop id or string was found, or all tokens that were asked for."""

GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: Collection[int] = ()
    """Generation ends with the first of these; it is part of the continuation's ids, not of its text."""
    stop_strings: Sequence[str] = ()
    """Generation ends when one of these stands in the text, wherever the tokens cut it; the text ends before it."""
    logprobs: int | None = None
    """Give the log-probability of each token and of so many most probable ones; null: none."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            raise UserError(f"generation: stop_strings is {self.stop_strings!r}; it must be a list of strings")
        if "" in self.stop_strings:
            raise UserError("generation: an empty stop string would stop at once; leave it out")
        if self.logprobs is not None and self.logprobs < 0:
            raise UserError(f"generation: logprobs is {self.logprobs}; it must be 0 or above")

    def samples(self, number: int) -> list[Request]:
        """``number`` requests that differ in their seeds alone: this one's, and those that follow it."""
        sampling = self.sampling
        return [replace(self, sampling=replace(sampling, seed=sampling.seed + index)) for index in range(number)]


@dataclass(frozen=True, slots=True)
class Token:
    """One more token of a request."""

    request: int
    """Which one, counted from 0 in the order in which they were given."""
    id: int
    text: str
    """What became final of the text with this token; "" without a tokenizer."""
    finish: Finish | None
    """Why this is the last one; null: it is not."""
    logprob: float | None = None
    """Of this id, natural, as the model gives it: before bias, penalty and temperature."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The most probable ids with theirs, in order."""


@dataclass
class Completion:
    """All of a request's tokens."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def add(self, token: Token) -> None:
        """Take in the next token."""
        self.ids.append(token.id)
        self.text += token.text
        self.finish = token.finish
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
            self.alternatives.append(token.alternatives)


def collect(tokens: Iterable[Token], number: int) -> list[Completion]:
    """The completions of ``number`` requests from their tokens in any order."""
    found = [Completion() for _ in range(number)]
    for token in tokens:
        found[token.request].add(token)
    return found
