"""TaperLN: TaperNorm (arXiv 2602.10408) for models with LayerNorm, as GPT-2. The mean-centring, linear, stays.

    y = g·LN(h) + (1 − g)·( c·γ~⊙(h − mean(h)) + β~ )
    c = E[ ||γ⊙(h − mean(h))||²/σ(h) ] / E[ ||γ⊙(h − mean(h))||² ]        σ(h) = sqrt(var(h) + ε)

The form is ours, by analogy with the RMS form: the paper's own was not available. Gate, calibration and phases:
``taper.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from llmstack.model.norms.folded import Affine, Folded, NoNorm
from llmstack.model.norms.layernorm import BareLayerNorm, LayerNorm, layer_norm
from llmstack.model.norms.taper import TaperedSite, TaperMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


class TaperLN(TaperedSite):
    """One site of TaperLN."""

    bias_origin: Tensor

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.bias_offset = nn.Parameter(torch.empty(hidden_size))
        self.register_buffer("bias_origin", torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1, β = 0, the gate open, the linear map unknown."""
        super().reset_parameters()
        for tensor in (self.bias, self.bias_offset, self.bias_origin):
            nn.init.zeros_(tensor)

    def norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def linear(self, x: Tensor) -> Tensor:
        return self.scale.to(x.dtype) * self.centre(x) + self.shift.to(x.dtype)

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    @property
    def shift(self) -> Tensor:
        """β~, [hidden] fp32."""
        return self.bias_origin + self.bias_offset

    def norm_parameters(self) -> list[Tensor]:
        return [self.weight, self.bias]

    def linear_parameters(self) -> list[Tensor]:
        return [self.offset, self.bias_offset]

    def freeze(self) -> None:
        """Fix c, and let γ~ and β~ start from γ and β, which must be whole."""
        super().freeze()
        self.bias_origin.copy_(self.bias)

    def folded(self) -> Folded:
        """c·γ~, β~ and the centring when the norm is gone; before the taper it is LayerNorm."""
        self.refuse_half_removed()
        if self.phase == "linear":
            return Folded(NoNorm(), Affine(self.scale, self.shift, centred=True))
        return Folded(BareLayerNorm(self.eps), Affine(self.weight, self.bias))


class FirstTaperLN(TaperLN):
    """The same as a block's first site; the second has nothing to reuse."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (normalised, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return super().folded().as_first_site()


@dataclass(frozen=True)
class InternalTaperLN(TaperMethod):
    """The norms of the blocks are tapered, the final LayerNorm stays."""

    name: ClassVar[str] = "taperln_internal"

    @property
    def takes_over(self) -> frozenset[str]:
        return frozenset({"layernorm"})

    @property
    def centred(self) -> bool:
        return True

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstTaperLN(config.hidden_size, config.rms_norm_eps)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return TaperLN(config.hidden_size, config.rms_norm_eps)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return LayerNorm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True)
class AllTaperLN(InternalTaperLN):
    """The final norm is tapered, too."""

    name: ClassVar[str] = "taperln_all"

    scale_loss: float = 0.1
    """λ of the loss that holds the scale of the last hidden state (published between 0.01 and 0.1); 0: none."""

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return TaperLN(config.hidden_size, config.rms_norm_eps)
