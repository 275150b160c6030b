"""What a site says of itself when a model is folded: what remains of it, and what the next matrices take over."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

Site = TypeVar("Site", bound=nn.Module)


class Affine(NamedTuple):
    """gain ⊙ (y − mean(y)) + bias, the mean only where ``centred``: a map that the matrices that follow can take over.

    ``gain`` and ``bias`` are [hidden].
    """

    gain: Tensor
    bias: Tensor | None = None
    centred: bool = False


class Folded(NamedTuple):
    """A site taken apart: the site is ``affine`` after ``remains``."""

    remains: nn.Module
    """What stands in the site's place, with the same interface."""
    affine: Affine
    """For every matrix that reads the site."""
    for_values: Affine | None = None
    """For the values alone, where they have a path of their own."""

    def as_first_site(self) -> Folded:
        """The same for a block's first site, which carries nothing to the second."""
        return self._replace(remains=FirstSite(self.remains))


@runtime_checkable
class Foldable(Protocol):
    """A site that can be taken apart."""

    def folded(self) -> Folded:
        """The site's parts; it stays as it is.

        Raises:
            UserError: the site is in a state that no linear map and no norm describes.
        """


class FirstSite(nn.Module):
    """A site as a block's first; there is nothing to carry."""

    def __init__(self, site: nn.Module) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``x`` [..., hidden] -> (the site's output, None)."""
        return self.site(x), None


class NoNorm(nn.Module):
    """Where a norm was: nothing."""

    def forward(self, x: Tensor, carry: None = None) -> Tensor:
        """``x`` as it is."""
        return x


def without_affine(site: nn.Module, kind: type[Site]) -> Site:
    """A module of class ``kind`` with all that ``site`` has but its γ and β (``weight``, ``bias``)."""
    bare = kind.__new__(kind)
    vars(bare).update(vars(site))
    bare._parameters = {name: tensor for name, tensor in site._parameters.items() if name not in ("weight", "bias")}
    bare._buffers = dict(site._buffers)
    return bare
