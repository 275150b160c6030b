"""Autoregressive generation over a static key-value cache: an eager prefill, then one token at a time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from llmstack.errors import UserError
from llmstack.inference.sampling import Sampler, Sampling
from llmstack.model import KVCache, Llama
from llmstack.model.llama import Block

GREEDY = Sampling()


class Generator:
    """Continues prompts with one model, one at a time, in memory that is allocated once.

    With ``compile`` one graph serves every block at every decoding step, whatever the prompt's length: the position is
    a tensor and the cache never changes its shape. The prefill stays eager, since its length differs with every prompt.
    Generators of one model size and ``max_length`` share the graph; a process may have 8 different ones.

    Args:
        model: put into evaluation mode here.
        max_length: positions of the cache, the most tokens of a prompt and its continuation together.
        compile: compile the blocks for the decoding step (a graph break is an error).
        dtype: of cached keys and values; none: that of the weights.
        use_cache: off: a full forward pass for every token. Slow; it proves the cache right.
        vocab_size: draw ids below this alone; none: all that the model has. Set it to the tokenizer's where the
            embedding is padded, or ids without a text can be drawn.

    Raises:
        UserError: ``max_length`` beyond the model's positions, ``compile`` without a cache, or a norm that cannot
            decode.
    """

    def __init__(
        self,
        model: Llama,
        max_length: int,
        *,
        compile: bool = False,
        dtype: torch.dtype | None = None,
        use_cache: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        limit = model.config.max_position_embeddings
        if not 1 <= max_length <= limit:
            raise UserError(f"generation: {max_length} positions asked for; the model has 1 to {limit}")
        if compile and not use_cache:
            raise UserError("generation: the compiled step needs the cache; turn one of the two choices round")
        self.model = model.eval()
        self.max_length = max_length
        self.vocab_size = vocab_size
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.cache: KVCache | None = None
        if use_cache:
            model.config.norm_method.check_decoding(model)
            self.cache = KVCache(model.config, 1, max_length, dtype or weight.dtype, weight.device)
        # Graphs belong to the code of `Block.forward`, so all blocks and all generators find the same ones.
        self._block: Callable[..., Tensor] | None = None
        if compile:
            self._block = torch.compile(Block.forward, fullgraph=True, dynamic=False)
        self._streams = 0

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """New ids as they are found: up to ``max_new_tokens``, or to the first of ``stop_ids``, which is given too.

        A stream that is still open when the next one starts is dead (they share the cache): reading on from it raises
        ``RuntimeError``.

        Raises:
            UserError: empty prompt, an id outside the vocabulary, or more tokens than there are positions.
        """
        self._check(prompt_ids, max_new_tokens)
        self._streams += 1
        return self._stream(list(prompt_ids), max_new_tokens, Sampler([sampling]), frozenset(stop_ids), self._streams)

    def warm_up(self) -> None:
        """Run one decoding step, so that a compiled one is ready before the first prompt comes. Ends an open stream."""
        if self.cache is not None:
            self._streams += 1
            zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self._decode(zero, zero)

    def _check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        if not prompt_ids:
            raise UserError("generation: the prompt is empty; give at least one token (such as BOS)")
        vocab_size = self.model.embed_tokens.num_embeddings
        outside = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise UserError(f"generation: id {outside} is outside the model's vocabulary, 0 to {vocab_size - 1}")
        if max_new_tokens < 1:
            raise UserError(f"generation: {max_new_tokens} new tokens asked for; at least 1 is needed")
        total, limit = len(prompt_ids) + max_new_tokens, self.model.config.max_position_embeddings
        if total > self.max_length:
            have = f"the model has {limit} positions"
            if self.max_length < limit:
                have = f"this generator was made for {self.max_length} (the model has {limit})"
            raise UserError(
                f"generation: {len(prompt_ids)} prompt tokens + {max_new_tokens} new ones are {total}, but {have}; "
                "shorten one of them"
            )

    def _stream(
        self, prompt: list[int], max_new_tokens: int, sampler: Sampler, stop_ids: frozenset[int], stream: int
    ) -> Iterator[int]:
        self._refuse_ended(stream)
        ids = torch.tensor([prompt], device=self.device)
        logits = self._prefill(ids)
        for position in range(len(prompt), len(prompt) + max_new_tokens):
            token = sampler.sample(logits[:, : self.vocab_size])[:, None]
            yield (found := int(token))
            if found in stop_ids or position + 1 == len(prompt) + max_new_tokens:
                return
            self._refuse_ended(stream)
            if self.cache is None:
                ids = torch.cat((ids, token), dim=1)
                logits = self._prefill(ids)
            else:
                logits = self._decode(token, torch.tensor([[position]], device=self.device))

    def _refuse_ended(self, stream: int) -> None:
        if stream != self._streams:
            raise RuntimeError("this stream has ended: its generator has been given another prompt")

    @torch.no_grad()
    def _prefill(self, ids: Tensor) -> Tensor:
        """Logits [1, vocab] of what follows ``ids`` [1, seq], whose keys and values fill the cache from its start."""
        if self.cache is not None:
            # Masked positions have weight 0, yet 0·NaN is NaN: nothing that an earlier prompt left may survive.
            for buffer in self.cache.buffers():
                buffer.zero_()
        return self._forward(ids, torch.arange(ids.shape[1], device=self.device)[None])

    @torch.no_grad()
    def _decode(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [1, vocab] of what follows ``token`` [1, 1] at ``position`` [1, 1]."""
        if self._block is None:
            return self._forward(token, position)
        with _blocks_run_as(self._block, self.model):
            return self._forward(token, position)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.model.lm_head(self.model.hidden_states(ids, positions=positions, cache=self.cache)[:, -1])


@contextmanager
def _blocks_run_as(compiled: Callable[..., Tensor], model: Llama) -> Iterator[None]:
    """Inside, the blocks of ``model`` run as ``compiled``; outside it is the model it was."""
    before = [vars(block).get("forward") for block in model.blocks]
    for block in model.blocks:
        vars(block)["forward"] = partial(compiled, block)
    try:
        yield
    finally:
        for block, forward in zip(model.blocks, before, strict=True):
            del vars(block)["forward"]
            if forward is not None:
                vars(block)["forward"] = forward
