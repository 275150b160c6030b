"""TaperNorm (arXiv 2602.10408): RMSNorm that is removed while the model trains; what remains folds away.

    y = g·γ⊙h/r(h) + (1 − g)·c·γ~⊙h        r(h) = sqrt(ms(h) + ε)
    c = E[ ||γ⊙h||²/r(h) ] / E[ ||γ⊙h||² ]

Internal-Taper tapers the norms of the blocks and keeps the final RMSNorm; All-Taper tapers that, too, and then needs
the scale loss. Gate, calibration and phases: ``taper.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from llmstack.model.norms.folded import Affine, Folded, NoNorm
from llmstack.model.norms.rmsnorm import BareRMSNorm, RMSNorm, rms_norm
from llmstack.model.norms.taper import TaperedSite, TaperMethod

if TYPE_CHECKING:
    from llmstack.model.config import ModelConfig


class TaperNorm(TaperedSite):
    """One site of TaperNorm."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.reset_parameters()

    def norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def linear(self, x: Tensor) -> Tensor:
        return self.scale.to(x.dtype) * x

    def norm_parameters(self) -> list[Tensor]:
        return [self.weight]

    def linear_parameters(self) -> list[Tensor]:
        return [self.offset]

    def folded(self) -> Folded:
        """c·γ~ when the norm is gone; before the taper it is RMSNorm."""
        self.refuse_half_removed()
        if self.phase == "linear":
            return Folded(NoNorm(), Affine(self.scale))
        return Folded(BareRMSNorm(self.eps), Affine(self.weight))


class FirstTaperNorm(TaperNorm):
    """The same as a block's first site; the second has nothing to reuse."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``x`` [..., hidden] -> (normalised, None)."""
        return super().forward(x), None

    def folded(self) -> Folded:
        return super().folded().as_first_site()


@dataclass(frozen=True)
class InternalTaper(TaperMethod):
    """The norms of the blocks are tapered, the final RMSNorm stays."""

    name: ClassVar[str] = "tapernorm_internal"

    @property
    def takes_over(self) -> frozenset[str]:
        return frozenset({"rmsnorm"})

    def attention_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return FirstTaperNorm(config.hidden_size, config.rms_norm_eps)

    def mlp_norm(self, config: ModelConfig, layer: int) -> nn.Module:
        return TaperNorm(config.hidden_size, config.rms_norm_eps)

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True)
class AllTaper(InternalTaper):
    """The final norm is tapered, too."""

    name: ClassVar[str] = "tapernorm_all"

    scale_loss: float = 0.1
    """λ of the loss that holds the scale of the last hidden state (published between 0.01 and 0.1); 0: none."""

    def final_norm(self, config: ModelConfig) -> nn.Module:
        return TaperNorm(config.hidden_size, config.rms_norm_eps)
