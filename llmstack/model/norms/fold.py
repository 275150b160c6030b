"""Folding: a trained model in its inference form, with the gains of its norms inside the matrices that follow.

    W(γ ⊙ y + β) + b = (W·diag(γ))y + (Wβ + b)      at q, k, v; at gate and up; at the head
    W(γ ⊙ (y − mean(y))) = (W·diag(γ)·P)y           P = I − 11ᵀ/d, where a norm is gone that removed the mean

What a site gives away and what remains of it, the site says itself (``folded.py``): of a norm the division remains, of
a bounded tanh the tanh, of a removed norm nothing. Products are formed in fp32 and cast back to the weights' type.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.head import LMHead
from llmstack.model.llama import Block, Llama
from llmstack.model.norms.dyt import EmbeddingScale
from llmstack.model.norms.folded import Affine, FirstSite, Foldable
from llmstack.model.norms.rmsnorm import BareRMSNorm

_logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""How far the folded model's logits may be from the original's, relative to their norm, by the type of the weights.

Both are computed in fp32 at least: what is left in bf16 is that the folded weights are rounded once more.
"""


class FoldError(UserError):
    """The folded model does not compute what the original does; the message has the numbers."""


@torch.no_grad()
def fold(model: Llama, *, defer_scale: bool = False) -> Llama:
    """The inference form of ``model``, proved on random tokens.

    ``model`` stays as it was: keeping it is how a fold is undone. The two share the storage of the weights that folding
    does not change, so a model that is trained on has to be folded again. The folded one is for inference: its
    parameters take no gradient, and its norms have no life. A tied head whose norm folds gets a matrix of its own (any
    head a bias where its norm has one), and the configuration says that it is not tied any more.

    Blocks whose norms act on the sum stay as they are, and the log says which.

    Args:
        model: whole (not sharded), on any device, compiled or not.
        defer_scale: where RMSNorm's division remains in a block, divide what the matrices give instead of what they
            read: W(x/rms) = (Wx)/rms (FlashNorm, arXiv 2407.09577). In fp16 Wx may overflow.

    Raises:
        UserError: norms that are half removed, or a model that is folded already.
        FoldError: the logits of the two differ by more than :data:`TOLERANCES`.
    """
    if is_folded(model):
        raise UserError("fold: this model is folded already")
    folded = inference_copy(model, untied=isinstance(model.norm, Foldable))
    left = []
    for layer, block in enumerate(folded.blocks):
        sites = block.attention_norm, block.mlp_norm
        method = block.norm_method
        if method is not None and method.folds(model.config) and all(isinstance(site, Foldable) for site in sites):
            _fold_block(block, defer_scale)
        else:
            left.append(str(layer))
    if left:
        _logger.warning("fold: the norms of layer %s cannot be folded and stay as they are", ", ".join(left))
    _fold_ends(folded)
    _verify(model, folded)
    return folded


def is_folded(model: Llama) -> bool:
    """Whether ``model`` came from :func:`fold`."""
    return any(block.norm_method is None for block in model.blocks)


def inference_copy(model: Llama, untied: bool = False) -> Llama:
    """Modules of their own over the parameters of ``model``; a tied head stays so unless ``untied``."""
    tied = model.config.tie_word_embeddings and not untied
    with torch.device("meta"):
        copy = Llama(replace(model.config, tie_word_embeddings=tied))
    # New parameters over the same storage: over the same parameters, a cast of the copy would cast the original.
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    for name, child in model.named_children():
        setattr(copy, name, deepcopy(child, shared))
    copy.scale_anchor = None
    for block in copy.blocks:
        # A compiled forward is bound to the block that it was compiled for.
        vars(block).pop("forward", None)
    return copy.eval()


def _fold_block(block: Block, defer_scale: bool) -> None:
    block.norm_method = None
    readers = {
        "attention_norm": (block.attention, ("q_proj", "k_proj", "v_proj")),
        "mlp_norm": (block.mlp, ("gate_proj", "up_proj")),
    }
    for place, (sublayer, names) in readers.items():
        site = cast(Foldable, getattr(block, place)).folded()
        deferred = _deferred(site.remains) if defer_scale else None
        setattr(block, place, site.remains if deferred is None else deferred)
        for name in names:
            linear = getattr(sublayer, name, None)
            if linear is not None:  # a plain MLP has no gate
                own = site.for_values if name == "v_proj" else None
                _take_over(linear, own or site.affine)
                setattr(sublayer, name, linear if deferred is None else DeferredLinear(linear))


def _fold_ends(model: Llama) -> None:
    """The final norm into the head; what scales the embedding's output into the embedding, if that is its own."""
    if isinstance(model.norm, Foldable):
        site = model.norm.folded()
        model.norm = site.remains
        _take_over(model.lm_head, site.affine)
    tied = model.lm_head.weight is model.embed_tokens.weight
    added_positions = model.config.positions in ("learned", "sinusoidal")
    scaling = model.after_embedding
    if isinstance(scaling, EmbeddingScale) and not tied and not added_positions:
        weight = scaling.folded_embedding(model.embed_tokens.weight)
        model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
        model.after_embedding = nn.Identity()


def _take_over(linear: nn.Linear | LMHead, affine: Affine) -> None:
    """Let ``linear`` do what ``affine`` did to its input."""
    dtype = linear.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    weight = linear.weight.to(wide)
    if affine.bias is not None:
        bias = weight @ affine.bias.to(wide)
        bias = bias if linear.bias is None else bias + linear.bias.to(wide)
        linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    weight = weight * affine.gain.to(wide)
    if affine.centred:
        weight = weight - weight.mean(1, keepdim=True)
    linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)


@dataclass
class Unscaled:
    """What a matrix reads whose division comes after it."""

    x: Tensor
    """[batch, seq, hidden]."""
    scale: Tensor
    """1/rms of each token, [batch, seq, 1] fp32."""

    @property
    def shape(self) -> torch.Size:
        """Of ``x``."""
        return self.x.shape


class DeferredRMSNorm(BareRMSNorm):
    """Measures, and leaves the division to the matrices that read it."""

    def forward(self, x: Tensor, carry: None = None) -> Unscaled:  # type: ignore[override]
        """``x`` [batch, seq, hidden] -> x and its scale."""
        return Unscaled(x, self.scale(x))


class DeferredLinear(nn.Module):
    """A linear layer that divides its product. The bias, which is not to be divided, comes after."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        self.linear.weight, self.bias = linear.weight, linear.bias

    def forward(self, read: Unscaled) -> Tensor:
        """Input [batch, seq, in] and its scale -> [batch, seq, out] in the input's dtype."""
        product = self.linear(read.x)
        scaled = (product * read.scale).to(product.dtype)
        return scaled if self.bias is None else scaled + self.bias


def _deferred(remains: nn.Module) -> nn.Module | None:
    """``remains`` with its division deferred; none if it is not RMSNorm's."""
    if isinstance(remains, FirstSite):
        site = _deferred(remains.site)
        return None if site is None else FirstSite(site)
    return DeferredRMSNorm(remains.eps) if isinstance(remains, BareRMSNorm) else None


def _verify(model: Llama, folded: Llama) -> None:
    """Both on the same random tokens."""
    weight = model.embed_tokens.weight
    shape = (2, min(32, model.config.max_position_embeddings))
    ids = torch.randint(weight.shape[0], shape, generator=torch.Generator().manual_seed(0)).to(weight.device)
    expected, found = _exact_logits(model, ids), _exact_logits(folded, ids)
    error = float((found - expected).norm() / expected.norm())
    if not error <= TOLERANCES[weight.dtype]:
        raise FoldError(
            f"fold: the logits of the folded model are {error:.2e} (relative, in norm) from the original's, more than "
            f"{TOLERANCES[weight.dtype]:.0e} in {weight.dtype}; the largest difference is "
            f"{float((found - expected).abs().max()):.3g}, the largest logit {float(expected.abs().max()):.3g}"
        )


def _exact_logits(model: Llama, ids: Tensor) -> Tensor:
    """Logits [batch, seq, vocab] in evaluation mode, fp64 from fp32 arithmetic (or fp64 as it is), not compiled.

    In bf16 arithmetic a model of a few layers is already 1e-2 from its own exact logits.
    """
    training, precision = model.training, torch.get_float32_matmul_precision()
    wide = torch.promote_types(model.embed_tokens.weight.dtype, torch.float32)
    exact = model if model.embed_tokens.weight.dtype == wide else inference_copy(model).to(wide)
    exact.eval()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.compiler.set_stance("force_eager"):
            return exact(ids).double()
    finally:
        torch.set_float32_matmul_precision(precision)
        model.train(training)
