"""A training with the norms' lives in it, without anything around: what the training loop's callback does."""

from collections.abc import Iterator

import torch

from llmstack.model import Llama
from llmstack.training.probe import probe
from llmstack.training.step import micro_batch_loss


def live(model: Llama, steps: int, lr: float = 3e-3, batch: tuple[int, int] = (4, 9)) -> Iterator[int]:
    """Train on random ids, and yield each step after it was made and lived through."""
    method = model.config.norm_method
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        ids = torch.randint(model.config.vocab_size, (batch[0], batch[1] + 1), generator=generator)
        data = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "valid_tokens": ids[:, 1:].numel()}
        observed = method.observed(model, step, steps)
        sums = probe(model, data, observed) if observed else {}
        loss, own = micro_batch_loss(model, data)
        (loss if own is None else loss + own).backward()
        optimiser.step()
        optimiser.zero_grad()
        method.after_step(model, step, steps, sums=sums)
        yield step
