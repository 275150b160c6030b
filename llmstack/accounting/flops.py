"""Training FLOPs of one token, by the conventions of the field."""

from typing import Literal

from llmstack.accounting.parameters import count_parameters
from llmstack.model import ModelConfig

Convention = Literal["palm", "causal"]

CONVENTIONS: dict[Convention, str] = {
    "palm": "PaLM: 6N + 12·L·H·Q·T",
    "causal": "causal: 6N + 6·L·H·Q·T, attention halved for its mask",
}
"""What to print beside a figure, so that two of different conventions are not compared."""


def matmul_parameters(config: ModelConfig) -> int:
    """N of the FLOPs formula: every parameter that a token is multiplied with.

    All but learned positions (nanoGPT) and, where the head has its own matrix, the token embedding (torchtitan). Norms
    count, as they do in the published figures.
    """
    counts = count_parameters(config)
    return counts.total - counts.positions - (0 if config.tie_word_embeddings else counts.embedding)


def model_flops_per_token(config: ModelConfig, seq_len: int, convention: Convention = "palm") -> int:
    """FLOPs that training on one token takes, forward and backward pass, in sequences of ``seq_len`` tokens.

    ``palm``: 6·N + 12·L·H·Q·T (Chowdhery et al., arXiv 2204.02311, appendix B) with N = :func:`matmul_parameters`, L
    layers, H query heads of size Q, T = ``seq_len``. It charges each token for all T positions. ``causal``: half the
    attention term, for the positions that a causal mask leaves. Element-wise work of norms and softmax is not counted,
    nor is recomputation (activation checkpointing makes a step slower, not the model larger); sharing key-value heads
    changes nothing but N.
    """
    attention = 12 * config.num_layers * config.num_heads * config.head_size * seq_len
    return 6 * matmul_parameters(config) + (attention if convention == "palm" else attention // 2)
