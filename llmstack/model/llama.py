"""The decoder: embedding, blocks, final norm, head. Llama, with the options that ablations of it need."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.attention import Attention, Mask, attention_mask, document_positions
from llmstack.model.config import ModelConfig
from llmstack.model.float32 import Float32Buffers
from llmstack.model.head import LMHead
from llmstack.model.kv_cache import Cache, LayerCache
from llmstack.model.norms.method import Gather, NormMethod, whole
from llmstack.model.recompute import Recompute, recomputed
from llmstack.model.rope import RotaryEmbedding, Rotation


class MLP(nn.Module):
    """Gated (``down(act(gate(x)) ⊙ up(x))``, Shazeer arXiv 2002.05202) or plain (``down(act(up(x)))``)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if self.kind in ("swiglu", "geglu"):
            self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [batch, seq, hidden] -> the same shape."""
        if self.kind == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.kind == "geglu":
            return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))
        x = self.up_proj(x)
        if self.kind == "relu":
            return self.down_proj(F.relu(x))
        return self.down_proj(F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


class Dropout(Float32Buffers, nn.Module):
    """Element dropout whose rate is a tensor, so that blocks of different rates share one compiled graph."""

    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.initial_rate = rate
        self.register_buffer("rate", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The configured rate."""
        nn.init.constant_(self.rate, self.initial_rate)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of any shape -> zeroed with probability ``rate``, scaled by 1/(1-rate); identity in evaluation."""
        if not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.rate
        return (x * keep / (1 - self.rate)).to(x.dtype)


class Block(nn.Module):
    """One pre-norm decoder block. What its norms are is the norm method's business."""

    def __init__(self, config: ModelConfig, method: NormMethod, layer: int) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm_method: NormMethod | None = method
        """None once the block is folded: no method finds sites of its own in it."""
        self.attention_norm = method.attention_norm(config, layer)
        self.attention = Attention(config)
        self.after_attention = method.after_attention(config, layer)
        self.mlp_norm = method.mlp_norm(config, layer)
        self.mlp = MLP(config)
        self.after_mlp = method.after_mlp(config, layer)
        self.dropout = Dropout(config.dropout_rate(layer)) if config.residual_dropout else nn.Identity()
        self.recompute: Recompute = "nothing"

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """``x`` [batch, seq, hidden] -> the same shape; the other arguments as in :class:`Attention`."""
        if self.training and self.recompute != "nothing":
            return recomputed(self.recompute, self._forward, x, rotation, mask, cache, positions)
        return self._forward(x, rotation, mask, cache, positions)

    def _forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Mask | None,
        cache: LayerCache | None,
        positions: Tensor | None,
    ) -> Tensor:
        u, carry = self.attention_norm(x)
        update = self.dropout(self.after_attention(self.attention(u, rotation, mask, cache, positions)))
        x = x + update if self.residual else update
        w = self.mlp_norm(x, carry)
        update = self.dropout(self.after_mlp(self.mlp(w)))
        return x + update if self.residual else update


class PostNormBlock(Block):
    """The block whose norms act on the sum, N(α·x + F(x)): Post-LN, DeepNorm, the lower part of Mix-LN."""

    def __init__(self, config: ModelConfig, method: NormMethod, layer: int) -> None:
        super().__init__(config, method, layer)
        scale = method.residual_scale(config)
        assert scale is not None
        self.residual_scale = scale

    def _forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Mask | None,
        cache: LayerCache | None,
        positions: Tensor | None,
    ) -> Tensor:
        x = self.attention_norm(self._sum(x, self.after_attention(self.attention(x, rotation, mask, cache, positions))))
        return self.mlp_norm(self._sum(x, self.after_mlp(self.mlp(x))))

    def _sum(self, x: Tensor, update: Tensor) -> Tensor:
        update = self.dropout(update)
        return torch.add(update, x, alpha=self.residual_scale) if self.residual else update


def build_block(config: ModelConfig, method: NormMethod, layer: int) -> Block:
    """Block ``layer`` (from 0), of the kind that its method needs."""
    own = method.in_layer(config, layer)
    kind = Block if own.residual_scale(config) is None else PostNormBlock
    return kind(config, own, layer)


class Llama(nn.Module):
    """Decoder-only language model.

    Raises:
        UserError: the configuration leaves ``vocab_size`` open, or the norm's options do not fit the architecture.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model config: vocab_size is not set; take it from the tokenizer or give a number")
        self.config = config
        method = config.norm_method
        method.check(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config) if config.positions == "rope" else None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.after_embedding = method.after_embedding(config)
        self.embedding_dropout = Dropout(config.embedding_dropout) if config.embedding_dropout else nn.Identity()
        self.layers = nn.ModuleList(build_block(config, method, layer) for layer in range(config.num_layers))
        self.norm = method.final_norm(config)
        self.scale_anchor = method.scale_anchor(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        if config.tie_word_embeddings:
            # The head owns the shared matrix too: under sharding a weight is whole only in its owner's forward.
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)
            self._register_state_dict_hook(_drop_tied_head)
            self.register_load_state_dict_pre_hook(_restore_tied_head)
        self.register_load_state_dict_post_hook(_settle)
        if self.embed_tokens.weight.device.type != "meta":
            self.initialise()

    @torch.no_grad()
    def initialise(self, gather: Gather = whole) -> None:
        """Give every parameter and derived buffer its initial value (after ``to_empty`` of a meta model, too)."""
        self.tie()
        for name, module in self.named_modules():
            self.initialise_module(name, module)
        self.config.norm_method.initialise(self, gather)

    def tie(self) -> None:
        """Make a tied head share the embedding's matrix (``to_empty`` gives each owner its own)."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    @torch.no_grad()
    def initialise_module(self, name: str, module: nn.Module) -> None:
        """Initial values of what ``module``, called ``name`` within the decoder, owns itself.

        Called for every module in the order of ``named_modules`` it draws the same numbers whether the parameters of
        the modules before are still whole or not.
        """
        if isinstance(module, nn.Linear | nn.Embedding | LMHead):
            _initialise_weights(name, module, self.config)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    @property
    def blocks(self) -> list[Block]:
        """The decoder blocks in order (``layers``, typed)."""
        return [cast(Block, block) for block in self.layers]

    def forward(self, input_ids: Tensor, **context: Any) -> Tensor:
        """``input_ids`` [batch, seq] -> logits [batch, seq, vocab]; ``context`` as in :meth:`hidden_states`."""
        return self.lm_head(self.hidden_states(input_ids, **context))

    def hidden_states(self, input_ids: Tensor, **context: Any) -> Tensor:
        """What the head sees, [batch, seq, hidden] after the final norm; arguments of :meth:`residual_stream`."""
        return self.norm(self.residual_stream(input_ids, **context))

    def residual_stream(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """What the final norm sees, [batch, seq, hidden] after the last block.

        Args:
            input_ids: [batch, seq] integers.
            positions: [batch, seq]; none: 0, 1, 2, … or, with ``document_ids``, restarting at each document.
            padding_mask: [batch, seq], true at real tokens; attention does not see the others.
            document_ids: [batch, seq]; attention does not cross from one to another.
            cache: keys and values of earlier positions; needs ``positions`` and excludes the two masks.
        """
        if positions is None:
            assert cache is None, "a cache needs positions"
            if document_ids is not None:
                positions = document_positions(document_ids)
            else:
                positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = cache.mask(positions) if cache is not None else attention_mask(padding_mask, document_ids)
        x = self._embed(input_ids, positions)
        rotation = self.rotary(positions) if self.rotary is not None else None
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, mask, cache.layer(index) if cache is not None else None, positions)
        return x

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        if self.config.positions == "learned":
            x = x + self.embed_positions(positions)
        elif self.config.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions, self.config.hidden_size).to(x.dtype)
        if torch.is_autocast_enabled(x.device.type):
            # The residual stream has the compute dtype, as it has when DeepSpeed casts the weights.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.embedding_dropout(self.after_embedding(x))


def _initialise_weights(name: str, module: nn.Linear | nn.Embedding | LMHead, config: ModelConfig) -> None:
    """N(0, std) for the matrix, 0 for the bias. A tied head is its embedding."""
    if not (isinstance(module, LMHead) and config.tie_word_embeddings):
        nn.init.normal_(module.weight, std=_weight_std(name, module, config))
    bias = getattr(module, "bias", None)
    if bias is not None:
        nn.init.zeros_(bias)


def _weight_std(name: str, module: nn.Module, config: ModelConfig) -> float:
    """The norm method's; else σ, or 1/sqrt(fan_in) for matrices that multiply, or less where a residual add follows."""
    own = config.norm_method.weight_std(config, name, module)
    if own is not None:
        return own
    if config.initialisation == "fan_in" and isinstance(module, nn.Linear):
        return 1 / math.sqrt(module.in_features)
    if config.initialisation == "depth_scaled" and name.endswith(("attention.o_proj", "mlp.down_proj")):
        # GPT-2 (Radford et al. 2019, section 2.3): two residual adds per block.
        return config.initializer_range / math.sqrt(2 * config.num_layers)
    return config.initializer_range


def sinusoidal_positions(positions: Tensor, width: int) -> Tensor:
    """[..., width] fp32: sin(p/10000^(2i/d)) at even, cos at odd columns (Vaswani et al., arXiv 1706.03762)."""
    pairs = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * 10000 ** (-pairs / width)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :width]


def _settle(module: nn.Module, incompatible: Any) -> None:
    """What the norms are doing follows from the buffers just read."""
    assert isinstance(module, Llama)
    module.config.norm_method.settle(module)


def _drop_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """A tied matrix is stored once, as the embedding."""
    state.pop(f"{prefix}lm_head.weight", None)


def _restore_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    if f"{prefix}embed_tokens.weight" in state:
        state[f"{prefix}lm_head.weight"] = state[f"{prefix}embed_tokens.weight"]
