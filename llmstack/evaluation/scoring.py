"""Log-probabilities of continuations, where what requests have in common is computed once. Torch alone.

The inputs of all requests form a tree of tokens: few-shot examples are shared by the questions of a task, a question by
its choices. A long beginning that many share is read once into keys and values; what hangs below it is cut into small
trees, each of which is one row of a batch, its tokens in depth-first order, and a mask lets every token see its own
ancestors alone. So each token is computed once however many requests contain it, and the head is applied only where a
continuation is scored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.model import Llama
from llmstack.model.attention import Mask, TrunkMask
from llmstack.model.kv_cache import LayerCache

WORTH_READING_ONCE = 32
"""Tokens that the rows of a batch must share at least to be read before them, and not as part of each."""

_BRANCHES = 256
"""Tokens beside what they share that a row may have in any case."""

_LOGITS_AT_ONCE = 2**26
"""Numbers of logits that exist at a time."""


class Request(NamedTuple):
    """``continuation`` after ``context``; a context that is too long for the window loses its beginning."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """Of one request."""

    logprob: float
    """Σ ln p of the continuation's tokens."""
    greedy: bool
    """Whether each of them is the most probable one."""


class Wanted(NamedTuple):
    """A token whose log-probability is asked for."""

    position: int
    """In the sequence: that of the token before it."""
    token: int
    request: int


@dataclass(eq=False)
class Node:
    """Tokens ``start`` to ``end`` of ``ids``, after those of its parent."""

    ids: list[int]
    start: int
    end: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    tokens: int = 0
    """Of itself and all below it."""

    @property
    def length(self) -> int:
        """Its own tokens."""
        return self.end - self.start


def score(
    model: Llama,
    requests: Sequence[Request],
    *,
    window: int,
    batch_tokens: int,
    batch_rows: int | None = None,
    in_parts: bool = True,
    forget_memory: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Score]]:
    """The scores of ``requests`` as they are found, each with its place among them.

    Args:
        model: in evaluation mode.
        requests: in any order, repeated or not.
        window: most tokens that the model sees at once.
        batch_tokens: tokens of a batch, about. Halved, for good, where the memory does not suffice.
        batch_rows: most rows of a batch.
        in_parts: read shared beginnings once. Off for models in which it matters where in a row a token stands.
        forget_memory: called where it does not.

    Raises:
        UserError: an empty context, a continuation longer than the window, an id that the model does not have, or
            probabilities that are not finite.
    """
    for request in requests:
        _check_ids(request, model.embed_tokens.num_embeddings)
    inputs = [_input(request, window) for request in requests]
    tree = build_tree(inputs, requests)
    batches = _Batches(model, batch_tokens, batch_rows, in_parts, forget_memory)
    left = [len(request.continuation) for request in requests]
    sums, greedy = [0.0] * len(requests), [True] * len(requests)
    for place, number in enumerate(left):
        if number == 0:
            yield place, Score(0.0, True)
    for wanted, logprobs, best in batches.run(tree, row_tokens=window):
        for (_, token, place), logprob, most_probable in zip(wanted, logprobs, best, strict=True):
            sums[place] += logprob
            greedy[place] &= most_probable == token
            left[place] -= 1
            if left[place] == 0:
                if not math.isfinite(sums[place]):
                    raise UserError(
                        "evaluation: the model's probabilities are not finite; its weights are damaged or overflow"
                    )
                yield place, Score(sums[place], greedy[place])


def _check_ids(request: Request, vocab_size: int) -> None:
    for ids in request:
        for wrong in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= wrong < vocab_size:
                raise UserError(
                    f"evaluation: id {wrong} is outside the model's vocabulary, 0 to {vocab_size - 1}; "
                    "is this the model's tokenizer?"
                )


def _input(request: Request, window: int) -> list[int]:
    """What the model reads: all tokens but the last one, as many as the window holds."""
    if len(request.continuation) > window:
        raise UserError(
            f"evaluation: a continuation of {len(request.continuation)} tokens is longer than the window of {window}"
        )
    if not request.context:
        raise UserError("evaluation: an empty context; give at least one token (such as BOS)")
    return [*request.context, *request.continuation][-(window + 1) : -1]


def shares(requests: Sequence[Request], number: int) -> list[list[int]]:
    """Places of ``requests`` in ``number`` shares of about the same tokens; those that begin alike stay together."""
    order = sorted(range(len(requests)), key=lambda place: (*requests[place].context, *requests[place].continuation))
    total = sum(len(one.context) + len(one.continuation) for one in requests)
    found: list[list[int]] = [[] for _ in range(number)]
    before = 0
    for place in order:
        found[min(before * number // max(total, 1), number - 1)].append(place)
        before += len(requests[place].context) + len(requests[place].continuation)
    return found


def build_tree(inputs: Sequence[list[int]], requests: Sequence[Request]) -> Node:
    """The root, without tokens, of a tree in which every input is a path and no two siblings begin alike."""
    root = Node([], 0, 0, None)
    path, before = [root], list[int]()
    order = sorted((place for place, request in enumerate(requests) if request.continuation), key=inputs.__getitem__)
    for place in order:
        ids = inputs[place]
        shared = _common(before, ids)
        while path[-1].start >= shared and path[-1].parent is not None:
            path.pop()
        if path[-1].end > shared:
            path[-1] = _split(path[-1], shared)
        if len(ids) > shared:
            node = Node(ids, shared, len(ids), path[-1])
            path[-1].children.append(node)
            path.append(node)
        _want(path, place, len(ids), requests[place].continuation)
        before = ids
    for node in _below(root):
        node.tokens = node.length + sum(child.tokens for child in node.children)
    return root


def _common(a: list[int], b: list[int]) -> int:
    """Tokens that both begin with."""
    low, high = 0, min(len(a), len(b))
    # Slices are compared much faster than single tokens.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(node: Node, at: int) -> Node:
    """Cut ``node`` in two; the upper part takes its place, and the part of what is wanted that belongs to it."""
    assert node.parent is not None
    upper = Node(node.ids, node.start, at, node.parent, [node])
    node.parent.children[-1] = upper
    node.start, node.parent = at, upper
    upper.wanted = [one for one in node.wanted if one.position < at]
    node.wanted = [one for one in node.wanted if one.position >= at]
    return upper


def _want(path: list[Node], place: int, length: int, continuation: Sequence[int]) -> None:
    """Ask for each token of ``continuation`` at the node that holds the token before it."""
    depth = len(path) - 1
    for offset, token in enumerate(reversed(continuation)):
        position = length - 1 - offset
        while path[depth].start > position:
            depth -= 1
        path[depth].wanted.append(Wanted(position, token, place))


def _below(root: Node) -> list[Node]:
    """``root`` and all below it, children before their parents."""
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += node.children
    return found[::-1]


class Row(NamedTuple):
    """A part of the tree that is computed together."""

    lead: list[Node]
    """The path to it from where the rows of a batch begin: too short to be read before them."""
    root: Node

    @property
    def tokens(self) -> int:
        """Of all its nodes."""
        return sum(node.length for node in self.lead) + self.root.tokens


class Prefix(NamedTuple):
    """Tokens that have been read already, and their keys and values by layer: [1, kv_heads, length, head_dim]."""

    length: int
    layers: list[tuple[Tensor, Tensor]]


class _Batches:
    """Computes a tree, a batch of rows at a time."""

    def __init__(
        self,
        model: Llama,
        batch_tokens: int,
        batch_rows: int | None,
        in_parts: bool,
        forget_memory: Callable[[], None],
    ) -> None:
        self._model, self._forget_memory = model, forget_memory
        self._tokens, self._rows = batch_tokens, batch_rows
        self._device = model.embed_tokens.weight.device
        self._in_parts = in_parts

    def run(self, root: Node, row_tokens: int) -> Iterator[Found]:
        """What is wanted in the tree, batch by batch, in rows of ``row_tokens`` at most where that is possible."""
        waiting = [_Work([root], [], Prefix(0, []))] if root.tokens else []
        while waiting:
            work = waiting.pop()
            nodes, prefix = work.nodes, work.prefix
            if work.to_read:
                prefix, found = self._read(work.to_read, prefix)
                yield found
            rows: list[Row] = []
            deeper: list[tuple[list[Node], Node]] = [([], node) for node in nodes]
            while deeper:
                lead, node = deeper.pop()
                row, path = Row(lead, node), [*lead, node]
                # Where the first token of a row is treated apart, no row may hold several beginnings.
                one_beginning = self._in_parts or node.parent is not None or len(node.children) == 1
                shared = sum(one.length for one in path)
                # In one row every branch is compared with all others, if only to be masked.
                few_branches = row.tokens - shared <= max(shared, _BRANCHES) or not self._in_parts
                if (row.tokens <= row_tokens and one_beginning and few_branches) or not node.children:
                    rows.append(row)
                elif self._in_parts and shared >= WORTH_READING_ONCE:
                    waiting.append(_Work(node.children, path, prefix))
                else:
                    if node.wanted:
                        # Part of every row below; what is wanted of it is found once, by itself.
                        rows.append(Row(lead, replace(node, children=[], tokens=node.length)))
                    deeper += [(path, child) for child in node.children]
            yield from self._run_rows(rows, prefix)

    def _run_rows(self, rows: list[Row], prefix: Prefix) -> Iterator[Found]:
        left = deque(sorted(rows, key=lambda row: row.tokens, reverse=True))
        while left:
            # Keys and values of the prefix are copied for each row, which costs less than a token does.
            number = max(1, self._tokens // (left[0].tokens + prefix.length // 8))
            if self._rows is not None:
                number = min(number, self._rows)
            batch = [left.popleft() for _ in range(min(number, len(left)))]
            found: Found | None = None
            try:
                found = self._compute(batch, prefix)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
            if found is None:
                # Out of the handler: the error holds the frames of the model, and so their tensors.
                self._tokens = max(1, sum(row.tokens for row in batch) // 2)
                self._forget_memory()
                left.extendleft(reversed(batch))
                continue
            yield found

    @torch.no_grad()
    def _read(self, path: list[Node], prefix: Prefix) -> tuple[Prefix, Found]:
        """``prefix`` continued by the tokens of ``path``, and what is wanted of the last node."""
        ids = torch.tensor([[token for node in path for token in node.ids[node.start : node.end]]], device=self._device)
        length = prefix.length + ids.shape[1]
        positions = torch.arange(prefix.length, length, device=self._device)[None]
        mask = torch.ones(1, 1, ids.shape[1], length, dtype=torch.bool, device=self._device).tril(prefix.length)
        cache = _OnPrefix(prefix, mask, kept=[])
        hidden = self._model.hidden_states(ids, positions=positions, cache=cache)
        assert cache.kept is not None
        places = [(0, one.position - prefix.length) for one in path[-1].wanted]
        return Prefix(length, cache.kept), self._find(hidden, path[-1].wanted, places)

    @torch.no_grad()
    def _compute(self, batch: list[Row], prefix: Prefix) -> Found:
        laid = [_lay_out(row) for row in batch]
        length = max(len(row.ids) for row in laid)
        ids, positions, nodes = (
            torch.tensor([part + [filling] * (length - len(part)) for part in parts], device=self._device)
            for parts, filling in (
                ([row.ids for row in laid], 0),
                ([row.positions for row in laid], 0),
                # The node after all others is that of the filling, which sees itself.
                ([row.nodes for row in laid], max(len(row.parents) for row in laid)),
            )
        )
        mask: Mask | None = None
        trunk = min(length if row.trunk is None else row.trunk for row in laid)
        if prefix.length:
            mask = _mask(nodes, [row.parents for row in laid], prefix.length, 0)
        elif trunk < length:
            mask = TrunkMask(trunk, _mask(nodes, [row.parents for row in laid], 0, trunk))
        hidden = self._model.hidden_states(ids, positions=positions, cache=_OnPrefix(prefix, mask))
        wanted = [one for row in laid for one in row.wanted]
        places = [(number, place) for number, row in enumerate(laid) for place in row.places]
        return self._find(hidden, wanted, places)

    def _find(self, hidden: Tensor, wanted: list[Wanted], places: list[tuple[int, int]]) -> Found:
        """``wanted``, whose token before stands at ``places`` (row, column) of ``hidden`` [batch, seq, hidden]."""
        distinct = {place: number for number, place in enumerate(dict.fromkeys(places))}
        columns = torch.tensor(list(distinct), device=hidden.device, dtype=torch.int64).view(-1, 2)
        seen = hidden[columns[:, 0], columns[:, 1]]
        rows = torch.tensor([distinct[place] for place in places], dtype=torch.int64)
        tokens = torch.tensor([one.token for one in wanted], dtype=torch.int64)
        logprobs, best = torch.empty(len(wanted)), torch.empty(len(distinct), dtype=torch.int64)
        step = max(1, _LOGITS_AT_ONCE // self._model.embed_tokens.num_embeddings)
        for start in range(0, len(distinct), step):
            logits = self._model.lm_head(seen[start : start + step]).float()
            best[start : start + step] = logits.argmax(-1).cpu()
            here = (rows >= start) & (rows < start + step)
            logits = logits.log_softmax(-1)
            own = (rows[here] - start).to(logits.device), tokens[here].to(logits.device)
            logprobs[here] = logits[own].cpu()
        return Found(wanted, logprobs.tolist(), best[rows].tolist())


class Found(NamedTuple):
    """Of a batch."""

    wanted: list[Wanted]
    logprobs: list[float]
    """ln p of each."""
    best: list[int]
    """The most probable token in the place of each."""


class _Work(NamedTuple):
    nodes: list[Node]
    to_read: list[Node]
    """What they share beyond ``prefix``."""
    prefix: Prefix


class _Layout(NamedTuple):
    """A row, token by token."""

    ids: list[int]
    positions: list[int]
    nodes: list[int]
    """That each token belongs to, counted within the row."""
    parents: list[int]
    """Of each node; -1: it stands at the beginning."""
    wanted: list[Wanted]
    places: list[int]
    """Of the token before each wanted one."""

    @property
    def trunk(self) -> int | None:
        """Tokens before the first that must not see all before it; none: there is no such."""
        first = next((number for number, parent in enumerate(self.parents) if parent != number - 1), None)
        return None if first is None else self.nodes.index(first)


def _lay_out(row: Row) -> _Layout:
    laid = _Layout([], [], [], [], [], [])
    waiting = [(row.root, len(row.lead) - 1)]
    order = [(node, number - 1) for number, node in enumerate(row.lead)]
    while waiting:
        node, parent = waiting.pop()
        order.append((node, parent))
        waiting += [(child, len(order) - 1) for child in node.children]
    for number, (node, parent) in enumerate(order):
        laid.parents.append(parent)
        if number >= len(row.lead):
            laid.wanted.extend(node.wanted)
            laid.places.extend(len(laid.ids) + one.position - node.start for one in node.wanted)
        laid.ids.extend(node.ids[node.start : node.end])
        laid.positions.extend(range(node.start, node.end))
        laid.nodes.extend([number] * node.length)
    return laid


def _mask(nodes: Tensor, parents: list[list[int]], prefix: int, first: int) -> Tensor:
    """Whom each token from ``first`` on sees, [batch, 1, seq - first, prefix + seq]: the prefix, and its ancestors."""
    batch, length = nodes.shape
    number = 1 + max(len(row) for row in parents)
    ancestors = torch.zeros(batch, number, number, dtype=torch.bool)
    for row, of in enumerate(parents):
        for node, parent in enumerate(of):
            if parent >= 0:
                ancestors[row, node] = ancestors[row, parent]
            ancestors[row, node, node] = True
    ancestors[:, -1, -1] = True
    ancestors = ancestors.to(nodes.device)
    queries = length - first
    seen = ancestors.gather(1, nodes[:, first:, None].expand(batch, queries, number))
    seen = seen.gather(2, nodes[:, None, :].expand(batch, queries, length)).tril(first)
    whole = torch.ones(batch, queries, prefix, dtype=torch.bool, device=nodes.device)
    return torch.cat((whole, seen), dim=2)[:, None]


class _OnPrefix:
    """A cache of what was read before: the rows of a batch continue the same prefix.

    Args:
        prefix: read already.
        mask: who sees whom, [batch, 1, seq, prefix + seq]; none: all before.
        kept: takes keys and values of prefix and rows, by layer; none: they are forgotten.
    """

    def __init__(self, prefix: Prefix, mask: Mask | None, kept: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self._prefix, self._mask, self.kept = prefix, mask, kept

    def layer(self, index: int) -> LayerCache:
        """Of block ``index``."""
        return _LayerOnPrefix(self._prefix.layers[index] if self._prefix.layers else None, self.kept)

    def mask(self, positions: Tensor) -> Mask | None:
        """As the rows need it."""
        return self._mask


class _LayerOnPrefix(NamedTuple):
    read: tuple[Tensor, Tensor] | None
    kept: list[tuple[Tensor, Tensor]] | None

    def update(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.read is not None:
            keys, values = (
                torch.cat((before.expand(len(own), -1, -1, -1), own), dim=2)
                for before, own in zip(self.read, (keys, values), strict=True)
            )
        if self.kept is not None:
            self.kept.append((keys, values))
        return keys, values
