"""What goes on inside a model, seen from beside the training. Torch only.

One eager forward pass of a few rows, without gradients and in evaluation mode, whose modules are watched by hooks: the
compiled step knows nothing of it. Parameters are read while the module that owns them runs, so a sharded model can
be watched, too, where all ranks do it together.

What a norm method has to show is registered by the class of its sites, with :func:`of_site`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmstack.model import Llama
from llmstack.model.attention import document_positions
from llmstack.model.head import IGNORE_INDEX, LMHead, loss_and_gradient_
from llmstack.model.norms.bhyt import FirstBHyT, SecondBHyT
from llmstack.model.norms.bhyt_star import EPS, BoundedTanh, Statistics
from llmstack.model.norms.dyt import DyT
from llmstack.model.norms.fake_ln import FakeLN, FakeLNBeforeAttention, FrozenScale
from llmstack.model.norms.taper import TaperedSite
from llmstack.training.probe import looking

ROWS = 2
"""Rows of a batch that are looked at."""

TOKENS = 64
"""Tokens, evenly spread over those rows, whose logits are looked at: with a vocabulary of 128,256, 33 MB in fp32."""

SATURATED = math.atanh(0.99)
"""Arguments of tanh beyond which its absolute value is above 0.99."""


class Quantity(NamedTuple):
    """What was measured, and where; the middle columns of diagnostics.csv."""

    layer: int | None
    site: str
    name: str


@torch.no_grad()
def diagnose(
    model: Llama, batch: Mapping[str, Any], eos_id: int | None = None, attention: bool = False
) -> dict[Quantity, float]:
    """Stream, sites and head of ``model`` on the first :data:`ROWS` rows of ``batch``.

    What is undefined there (EOS tokens where there are none, a correlation of constants) is left out.

    Args:
        model: whole, or sharded; then every rank must look. Any gradients it holds are left alone.
        batch: ``input_ids`` and ``labels`` [batch, seq], optionally ``document_ids`` [batch, seq].
        eos_id: the token whose stream is measured by itself.
        attention: the entropy of attention, too, for which every head's probabilities are computed once more.
    """
    rows = {name: batch[name][:ROWS] for name in ("input_ids", "labels", "document_ids") if name in batch}
    look = _Look(model, rows["input_ids"], rows["labels"], rows.get("document_ids"), eos_id)
    entropies = _AttentionEntropies()
    with ExitStack() as stack:
        stack.enter_context(looking(model, look.watched()))
        # Before the hook with which a strategy takes the weights away again.
        stack.callback(model.lm_head.register_forward_hook(look.at_head, prepend=True).remove)
        documents = rows.get("document_ids")
        # No token is padding; but with such a mask attention is called in the one form that entropies are taken of.
        nothing_hidden = None if documents is None else torch.ones_like(documents)
        with entropies if attention else nullcontext():
            hidden = model.hidden_states(rows["input_ids"], document_ids=documents, padding_mask=nothing_hidden)
        model.lm_head(hidden.flatten(0, 1)[look.chosen])
    for layer, entropy in enumerate(entropies.found):
        look.found[Quantity(layer, "", "attention_entropy")] = entropy
    return on_host(look.found)


def on_host(found: Mapping[Quantity, Tensor]) -> dict[Quantity, float]:
    """The numbers, fetched at once, without those that are not defined."""
    if not found:
        return {}
    values = torch.stack([value.double().reshape(()) for value in found.values()]).tolist()
    return {quantity: value for quantity, value in zip(found, values, strict=True) if not math.isnan(value)}


@dataclass(frozen=True)
class Surroundings:
    """What a site cannot know by itself."""

    first_site: nn.Module | None
    """The first site of the same block; of the final norm: none."""
    attended: Tensor
    """[batch, seq, 1] fp32: how many tokens each one attends to, itself among them."""


class _Look:
    """One forward pass being watched; ``found`` fills as it goes on."""

    def __init__(
        self, model: Llama, ids: Tensor, labels: Tensor, document_ids: Tensor | None, eos_id: int | None
    ) -> None:
        self.model, self.labels = model, labels.flatten()
        self.is_eos = torch.zeros_like(ids, dtype=torch.bool) if eos_id is None else ids == eos_id
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions = positions if document_ids is None else document_positions(document_ids)
        self.attended = (positions + 1).unsqueeze(-1).float()
        self.chosen = _spread(self.labels != IGNORE_INDEX)
        self.found: dict[Quantity, Tensor] = {}

    def watched(self) -> list[tuple[nn.Module, Callable[..., None]]]:
        """Modules, and what to do with their inputs."""
        watched: list[tuple[nn.Module, Callable[..., None]]] = []
        for layer, block in enumerate(self.model.blocks):
            around = Surroundings(block.attention_norm, self.attended)
            watched += [
                (block, self._at_stream(layer)),
                (block.attention_norm, self._at_site(layer, "attention", around)),
                (block.mlp_norm, self._at_site(layer, "mlp", around)),
            ]
        around = Surroundings(None, self.attended)
        return [
            *watched,
            (self.model.norm, self._at_stream(len(self.model.blocks))),
            (self.model.norm, self._at_site(None, "final", around)),
            (self.model.norm, self._at_final_norm),
        ]

    def _at_stream(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._add(layer, "", stream_quantities(inputs[0], self.is_eos))

        return hook

    def _at_site(self, layer: int | None, name: str, around: Surroundings) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            carry = inputs[1] if len(inputs) > 1 else None
            self._add(layer, name, of_site(module, inputs[0], carry, around))

        return hook

    def _at_final_norm(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        h = _wide(inputs[0])
        scale = (h.pow(2).mean(-1) + self.model.config.rms_norm_eps).sqrt().flatten()
        self._add(None, "final", {"scale_mean": scale.mean(), "scale_p99": torch.quantile(scale, 0.99)})
        # How the norm's output moves when h becomes longer. `forward` itself: the weights are whole, and no hook runs.
        moved: Tensor = torch.func.jvp(norm.forward, (h,), (h,))[1]
        self.moved = moved.flatten(0, 1)[self.chosen]
        self.length = h.flatten(0, 1)[self.chosen].norm(dim=-1)

    def at_head(self, head: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> None:
        """Logits of the chosen tokens, and ⟨∂l/∂h, h⟩/‖h‖ of each token's own cross-entropy l.

        ⟨∂l/∂h, h⟩ = ⟨∂l/∂y, J·h⟩, with J the derivative of the final norm y(h): no backward pass, which a sharding
        strategy would notice.
        """
        assert isinstance(head, LMHead)
        gradient, labels = _wide(logits).clone(), self.labels[self.chosen]
        loss_and_gradient_(gradient, labels, gradient.new_ones(()))
        by_y = gradient.to(head.weight.dtype) @ head.weight
        radial = (by_y.to(self.moved.dtype) * self.moved).sum(-1) / self.length
        found = {"max_abs_logit": logits.abs().max(), "radial_gradient": radial[labels != IGNORE_INDEX].mean()}
        self._add(None, "final", found)

    def _add(self, layer: int | None, site: str, found: Mapping[str, Tensor]) -> None:
        # A copy: a parameter of a sharded model is empty again when its module has run.
        self.found |= {Quantity(layer, site, name): value.clone() for name, value in found.items()}


def _spread(wanted: Tensor) -> Tensor:
    """At most :data:`TOKENS` indices, evenly spread over those that are ``wanted`` [tokens]; never none, since all
    ranks have to run the head."""
    indices = wanted.nonzero().flatten()
    if len(indices) == 0:
        return indices.new_zeros(1)
    return indices[torch.linspace(0, len(indices) - 1, min(TOKENS, len(indices)), device=indices.device).long()]


def stream_quantities(x: Tensor, is_eos: Tensor) -> dict[str, Tensor]:
    """Over all elements of ``x`` [batch, seq, hidden], all tokens alike: E|x|, Var x, sqrt(E x²), max |x| and
    E(x − Ex)⁴/Var² (3 for a Gaussian); and sqrt(E x²) of the first tokens alone, and of those where ``is_eos``.
    """
    wide = _wide(x)
    square, centred = wide.pow(2), wide - wide.mean()
    of_token, variance = square.mean(-1), centred.pow(2).mean()
    return {
        "stream_mean_abs": wide.abs().mean(),
        "stream_variance": variance,
        "stream_rms": square.mean().sqrt(),
        "stream_max_abs": wide.abs().max(),
        "stream_kurtosis": (centred * variance.rsqrt()).pow(4).mean(),
        "stream_first_token_rms": of_token[:, 0].mean().sqrt(),
        "stream_eos_rms": ((of_token * is_eos).sum() / is_eos.sum()).sqrt(),
    }


@singledispatch
def of_site(site: nn.Module, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    """What a norm of this class has to show when it reads ``x`` [batch, seq, hidden]: scalars by name, NaN where not
    defined. ``carry`` is what a first site handed on. Called while the site's parameters are whole."""
    return {}


@of_site.register
def _(site: BoundedTanh, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    return _bounded(site, x, site.statistics(x))


@of_site.register
def _(site: SecondBHyT, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    """Beside the variance as measured the carried one, and that with c_attn·T/t at position t: a token attends to t
    tokens, not to all T."""
    first = around.first_site
    assert isinstance(first, FirstBHyT)
    exact, approximated = site.statistics(x)[0], carry[0]
    correction = first.c_attn * (first.lam.to(exact.dtype) / first.kappa) ** 2
    causal = approximated + correction * (first.train_length / around.attended - 1)
    return {
        **_bounded(site, x, carry),
        "variance_exact": exact.mean(),
        "variance_approximated": approximated.mean(),
        "variance_pearson": _pearson(exact, approximated),
        "variance_approximated_causal": causal.mean(),
        "variance_pearson_causal": _pearson(exact, causal),
    }


def _bounded(site: BoundedTanh, x: Tensor, statistics: Statistics) -> dict[str, Tensor]:
    spread, mean = statistics
    scale = site.kappa * (spread + EPS).sqrt() + (0.0 if mean is None else mean.abs())
    argument = site.lam.to(spread.dtype) * _wide(x) / scale
    return {"lambda": site.lam, "tanh_saturation": _saturation(argument)}


@of_site.register
def _(site: DyT, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    wide = _wide(x)
    return {"alpha": site.alpha, "tanh_saturation": _saturation(site.alpha.to(wide.dtype) * wide)}


@of_site.register
def _(site: TaperedSite, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    """c·r(h), mean over the tokens: 1 where the linear map is as large as the norm."""
    scale = (site.centre(_wide(x)).pow(2).mean(-1) + site.eps).sqrt().mean()
    return {"gate": site.gate, "scale_ratio": _if_set(site.c) * scale}


@of_site.register
def _(site: FakeLN, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    return {"frozen_scale": _frozen(site.frozen_scale)}


@of_site.register
def _(site: FakeLNBeforeAttention, x: Tensor, carry: Any, around: Surroundings) -> dict[str, Tensor]:
    return {"frozen_scale": _frozen(site.frozen_scale), "frozen_scale_v": _frozen(site.frozen_scale_v)}


def _frozen(path: FrozenScale) -> Tensor:
    return _if_set(path.scale)


def _if_set(value: Tensor) -> Tensor:
    """A number that is 0 until it is known."""
    return torch.where(value == 0, math.nan, value)


def _saturation(argument: Tensor) -> Tensor:
    return (argument.abs() > SATURATED).float().mean()


def _pearson(a: Tensor, b: Tensor) -> Tensor:
    a, b = (values.double() - values.double().mean() for values in (a, b))
    return (a * b).sum() / (a.pow(2).sum() * b.pow(2).sum()).sqrt()


class _AttentionEntropies(TorchFunctionMode):
    """−Σ p·ln p of each attention that runs inside, mean over heads and queries; one matrix of scores at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found.append(attention_entropy(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def attention_entropy(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float
) -> Tensor:
    """Mean over heads and queries, in nats; arguments of ``F.scaled_dot_product_attention``."""
    length, keys = q.shape[-2], k.shape[-2]
    causal = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril()
    total = q.new_zeros((), dtype=torch.float64)
    for row in range(q.shape[0]):
        visible = causal if attn_mask is None else attn_mask[row, 0]
        for queries, keys_of_head in zip(q[row], k[row], strict=True):
            scores = (queries @ keys_of_head.T).float() * scale
            p = scores.masked_fill(~visible, -math.inf).softmax(-1)
            total += torch.special.entr(p).sum(dtype=torch.float64)
    assert is_causal or attn_mask is not None
    return total / (q.shape[0] * q.shape[1] * length)


@torch.no_grad()
def gradient_norms(model: Llama, gradient_of: Callable[[nn.Parameter], Tensor | None]) -> dict[Quantity, float]:
    """2-norm of the gradient of each block; of the embeddings with what follows them; of final norm and untied head.

    Their squares add up to that of the whole gradient. ``gradient_of`` gives that of a parameter, None where there is
    none.
    """
    norms: dict[Quantity, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        if gradient is not None:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
            norms.setdefault(_part(name), []).append(norm)
    return on_host({part: torch.stack(of_part).norm() for part, of_part in norms.items()})


def _part(name: str) -> Quantity:
    """Where the parameter ``name`` of the decoder belongs."""
    top, *inner = name.split(".")
    if top == "layers":
        return Quantity(int(inner[0]), "", "gradient_norm")
    return Quantity(None, "head" if top in ("norm", "lm_head") else "embedding", "gradient_norm")


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
