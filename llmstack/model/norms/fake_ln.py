"""FakeLN: LayerNorm removed by fine-tuning, site by site (arXiv 2409.13710, 2507.02559; submarat/removing-layer-norm).

    FakeLN(x) = γ ⊙ (x − mean(x)) / s̄ + β        s̄ = average of sqrt(var(x) + ε), frozen when the site is switched

s̄ is a bias-corrected moving average over optimiser steps of the mean over all tokens and ranks, until the site is
switched. The norm before attention has two paths with an s̄ each: one to Q and K, one to V. Order, one layer after the
other: every MLP norm, every Q and K path, every V path, the final norm. With ``first_token`` the first position of a
sequence, whose norm is far from the others', has an s̄ of its own until it is merged at the end.

``kind: rmsnorm`` does the same to RMSNorm: γ ⊙ x / s̄ with the average of sqrt(ms(x) + ε).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.model.float32 import Float32Buffers
from llmstack.model.norms.folded import Affine, Folded, NoNorm
from llmstack.model.norms.layernorm import BareLayerNorm
from llmstack.model.norms.method import NOTHING, Gather, Observed, whole
from llmstack.model.norms.rmsnorm import BareRMSNorm
from llmstack.model.norms.scale_anchor import AnchoredMethod, MovingAverage

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig
    from llmstack.model.llama import Llama


class FrozenScale(Float32Buffers, nn.Module):
    """s̄ of one path: for all tokens, and for the first of a sequence."""

    scale: Tensor
    first_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.average = MovingAverage(3)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("first_scale", torch.zeros(1))

    def reset_parameters(self) -> None:
        """Not switched."""
        nn.init.zeros_(self.scale)
        nn.init.zeros_(self.first_scale)

    def freeze(self, first_token: bool) -> None:
        """The scale stands from here on; ``first_token``: that of the first token is another one."""
        every, rest, first = self.average.value.unbind()
        self.scale.fill_(rest if first_token else every)
        self.first_scale.fill_(first if first_token else every)

    @property
    def is_final(self) -> bool:
        """Whether it divides every token by one number, for good."""
        return bool(self.scale > 0) and torch.equal(self.scale, self.first_scale)

    def forward(self, measured: Tensor) -> Tensor:
        """``measured`` [batch, seq, 1], the scale of each token -> what divides it, the same shape."""
        fixed = torch.cat([self.first_scale.expand_as(measured[:, :1]), self.scale.expand_as(measured[:, 1:])], dim=1)
        # A tensor decides, not a Python switch: while layers are removed one by one they share one compiled graph.
        return torch.where(self.scale > 0, fixed.to(measured.dtype), measured)


class FakeLN(nn.Module):
    """One site with one path: the MLP's or the final one."""

    def __init__(self, hidden_size: int, eps: float, centred: bool) -> None:
        super().__init__()
        self.eps, self.centred = eps, centred
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if centred else None
        self.frozen_scale = FrozenScale()
        self.is_linear = False
        """Whether the whole model is: then nothing is measured."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1, β = 0, no path switched."""
        self.is_linear = False
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def paths(self) -> dict[str, FrozenScale]:
        """Each scale of the site, by the order's name of it."""
        return {"mlp": self.frozen_scale}

    def centre(self, x: Tensor) -> Tensor:
        """``x`` in fp32 (or fp64 as it is), without its mean where that is removed."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide - wide.mean(-1, keepdim=True) if self.centred else wide

    def measure(self, centred: Tensor) -> Tensor:
        """sqrt(mean square + ε) of each token, [..., 1]."""
        return (centred.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def divided(self, centred: Tensor, scale: FrozenScale, dtype: torch.dtype) -> Tensor:
        """γ ⊙ ``centred`` / scale + β in ``dtype``."""
        by = scale.scale if self.is_linear else scale(self.measure(centred))
        y = self.weight.to(centred.dtype) * (centred / by.to(centred.dtype))
        return (y if self.bias is None else y + self.bias.to(centred.dtype)).to(dtype)

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` [batch, seq, hidden] -> the same shape and dtype."""
        return self.divided(self.centre(x), self.frozen_scale, x.dtype)

    def folded(self) -> Folded:
        """γ/s̄, β and the centring when every path is switched for good; before the first is, it is the norm."""
        scales = list(self.paths().values())
        if all(scale.is_final for scale in scales):
            maps = [Affine(self.weight / scale.scale, self.bias, self.centred) for scale in scales]
            return Folded(NoNorm(), *maps)
        if any(bool(scale.scale > 0) for scale in scales):
            raise UserError(
                "fold: a norm is half removed (not on all its paths, or not for the first token); fold a checkpoint "
                "from before the removal or from after its end"
            )
        bare = BareLayerNorm(self.eps) if self.centred else BareRMSNorm(self.eps)
        return Folded(bare, Affine(self.weight, self.bias))

    def sums(self, x: Tensor) -> Tensor:
        """Σ over the tokens of ``x`` [batch, seq, hidden] of their scale, and how many; the same over the first tokens
        of the rows; fp64."""
        scale = self.measure(self.centre(x)).squeeze(-1).double()
        first = scale[:, 0]
        return torch.stack([scale.sum(), first.sum(), first.new_tensor(scale.numel()), first.new_tensor(len(first))])


class FakeLNBeforeAttention(FakeLN):
    """The first site: one path to Q and K, another to V."""

    def __init__(self, hidden_size: int, eps: float, centred: bool) -> None:
        super().__init__(hidden_size, eps, centred)
        self.frozen_scale_v = FrozenScale()

    def paths(self) -> dict[str, FrozenScale]:
        return {"qk": self.frozen_scale, "v": self.frozen_scale_v}

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:  # type: ignore[override]
        """``x`` [batch, seq, hidden] -> ((for Q and K, for V), None)."""
        centred = self.centre(x)
        qk = self.divided(centred, self.frozen_scale, x.dtype)
        return (qk, self.divided(centred, self.frozen_scale_v, x.dtype)), None

    def folded(self) -> Folded:
        return super().folded().as_first_site()


@dataclass(frozen=True)
class FakeLNMethod(AnchoredMethod):
    """Norms that become linear one after the other; the published numbers of steps are those of GPT-2 small."""

    name: ClassVar[str] = "fake_ln"

    kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    """The norm that is removed."""
    start_mlp: int = 20
    """Optimiser step after which the MLP norm of the first layer is switched."""
    start_qk: int = 44
    """The same for the Q and K path of the norm before attention."""
    start_v: int = 68
    """The same for its V path."""
    start_final: int = 104
    """Step after which the final norm is switched."""
    gap_mlp: int = 2
    """Steps from one layer's MLP norm to the next."""
    gap_qk: int = 2
    """The same for the Q and K paths."""
    gap_v: int = 3
    """The same for the V paths."""
    scale_average_decay: float = 0.9
    """Decay of the moving average, over optimiser steps, that s̄ is taken from."""
    first_token: bool = False
    """Give the first position of a sequence an s̄ of its own, until ``start_merge``."""
    start_merge: int = 116
    """Step after which the first position gets the s̄ of all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("start_mlp", "start_qk", "start_v", "start_final", "gap_mlp", "gap_qk", "gap_v", "start_merge"):
            if getattr(self, option) < 1:
                raise UserError(f"norm fake_ln: {option} is {getattr(self, option)}; it must be at least 1")
        if not 0 <= self.scale_average_decay < 1:
            raise UserError(f"norm fake_ln: scale_average_decay is {self.scale_average_decay}; it must be in [0, 1)")

    @property
    def takes_over(self) -> frozenset[str]:
        return frozenset({self.kind})

    @property
    def centred(self) -> bool:
        return self.kind == "layernorm"

    def check(self, config: ModelConfig) -> None:
        last = max(self.switches(config.num_layers).values())
        if self.first_token and self.start_merge <= last:
            raise UserError(
                f"norm fake_ln: start_merge is {self.start_merge}; the last site of this model is switched after step "
                f"{last}, and the merge must come later"
            )

    def switches(self, num_layers: int) -> dict[tuple[str, int], int]:
        """(path, layer) -> the optimiser step after which it is switched; the final norm is ("final", num_layers)."""
        starts = {
            "mlp": (self.start_mlp, self.gap_mlp),
            "qk": (self.start_qk, self.gap_qk),
            "v": (self.start_v, self.gap_v),
        }
        steps = {
            (path, layer): start + gap * layer for path, (start, gap) in starts.items() for layer in range(num_layers)
        }
        return {**steps, ("final", num_layers): self.start_final}

    def anchor_step(self, max_steps: int) -> int:
        return min(self.start_mlp, self.start_final)

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FakeLNBeforeAttention(config.hidden_size, config.rms_norm_eps, self.centred)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FakeLN(config.hidden_size, config.rms_norm_eps, self.centred)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return FakeLN(config.hidden_size, config.rms_norm_eps, self.centred)

    def sites(self, model: Llama) -> dict[str, tuple[FakeLN, dict[FrozenScale, int]]]:
        """Module name -> the site, and for each of its scales the step after which it is switched."""
        steps = self.switches(len(model.blocks))
        found: dict[str, tuple[FakeLN, dict[FrozenScale, int]]] = {}
        for layer, block in enumerate(model.blocks):
            if block.norm_method == self:
                for name in ("attention_norm", "mlp_norm"):
                    site: FakeLN = getattr(block, name)
                    due = {scale: steps[path, layer] for path, scale in site.paths().items()}
                    found[f"layers.{layer}.{name}"] = site, due
        if isinstance(model.norm, FakeLN) and model.blocks[-1].norm_method == self:
            found["norm"] = model.norm, {model.norm.frozen_scale: steps["final", len(model.blocks)]}
        return found

    def observed(self, model: Llama, step: int, max_steps: int) -> dict[str, Observed]:
        """The scale of every site that is not switched yet."""
        wishes = super().observed(model, step, max_steps)
        for name, (site, due) in self.sites(model).items():
            if step <= max(due.values()):
                wishes[name] = site, site.sums
        return wishes

    @torch.no_grad()
    def after_step(
        self, model: Llama, step: int, max_steps: int, gather: Gather = whole, sums: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Go on averaging, and switch what is due."""
        super().after_step(model, step, max_steps, gather, sums)
        sites = self.sites(model)
        for name, (_, due) in sites.items():
            for scale, switch in due.items():
                if step <= switch:
                    every, first, tokens, rows = sums[name]
                    rest = (every - first) / (tokens - rows)
                    means = torch.stack([every / tokens, rest, first / rows])
                    scale.average.update(means, self.scale_average_decay)
                if step == switch:
                    scale.freeze(self.first_token)
                if self.first_token and step == self.start_merge:
                    scale.first_scale.copy_(scale.scale)
        last = max(switch for _, due in sites.values() for switch in due.values())
        if step == (self.start_merge if self.first_token else last):
            self._conclude(model)

    def settle(self, model: Llama) -> None:
        """Whether the loss counts, and whether anything is still measured."""
        super().settle(model)
        self._conclude(model)

    def check_decoding(self, model: Llama) -> None:
        apart = [scale for _, due in self.sites(model).values() for scale in due if scale.scale > 0]
        if not all(scale.is_final for scale in apart):
            raise UserError(
                "norm fake_ln: the first token of a sequence still has a scale of its own, which decoding cannot give "
                f"it; train past step {self.start_merge} (start_merge)"
            )

    def _conclude(self, model: Llama) -> None:
        sites = self.sites(model).values()
        done = all(scale.is_final for _, due in sites for scale in due)
        for site, _ in sites:
            site.is_linear = done
