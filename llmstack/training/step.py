"""The training step that Lightning and the benches share. Torch only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from llmstack.model import Llama


def micro_batch_loss(model: Llama, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Σ −log p over the batch's valid labels / valid labels of the whole optimiser step, fp32 scalar.

    The losses of a step's micro-batches (and ranks) add up to its mean loss, whatever the accumulation. Beside it the
    norm method's own loss, where it has one: a mean over the tokens of this micro-batch.

    Args:
        model: the decoder.
        batch: ``input_ids`` and ``labels`` [batch, seq], ``valid_tokens`` (integer of the whole optimiser step),
            optionally ``document_ids`` [batch, seq].
    """
    stream = model.residual_stream(batch["input_ids"], document_ids=batch.get("document_ids"))
    loss = model.lm_head(model.norm(stream), batch["labels"], batch["valid_tokens"])
    anchor = model.scale_anchor
    return loss, anchor(stream) if anchor is not None and anchor.active else None


def token_losses(model: Llama, batch: Mapping[str, Any]) -> Tensor:
    """−log p of each label, [batch, seq] fp32, 0 where it is -100; no gradient."""
    hidden = model.hidden_states(batch["input_ids"], document_ids=batch.get("document_ids"))
    return model.lm_head(hidden, batch["labels"])


def random_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """Seed of all randomness inside one forward pass: a resumed run draws what the uninterrupted one would."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
