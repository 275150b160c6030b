"""Tensors in safetensors files, read one at a time and only when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmstack.errors import UserError

_LISTED = 4


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files under one set of names.

    ``files[name]`` reads that tensor into memory of its own: nothing stays mapped, so the files may be replaced or
    removed afterwards.

    Args:
        places: for each name, the file and the name in it.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places = dict(places)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> TensorFiles:
        """All tensors of the files, under their stored names.

        Raises:
            UserError: a file is no safetensors file, or two files hold the same name.
        """
        places: dict[str, tuple[Path, str]] = {}
        for path in paths:
            with _opened(path) as file:
                names = list(file.keys())
            for name in names:
                if name in places:
                    raise UserError(f"{path}: holds the tensor {name}, and so does {places[name][0]}")
                places[name] = path, name
        return cls(places)

    @property
    def paths(self) -> list[Path]:
        """The files, sorted."""
        return sorted({path for path, _ in self._places.values()})

    def renamed(self, names: Mapping[str, str]) -> TensorFiles:
        """The tensors ``{new: old}`` of these, under the new names."""
        return TensorFiles({new: self._places[old] for new, old in names.items()})

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, in the stored dtype unless another is asked for."""
        path, stored = self._places[name]
        with _opened(path) as file:
            return file.get_tensor(stored).to(device=device, dtype=dtype, copy=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self.paths:
            with _opened(path) as file:
                for name, (place, stored) in self._places.items():
                    if place == path:
                        found[name] = tuple(file.get_slice(stored).get_shape())
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places


def require_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Check that ``found`` are exactly the ``expected`` names and shapes.

    Raises:
        UserError: names what is missing, what is too much and what has another shape.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    reshaped = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = [
        f"{what} {_some(names)}"
        for what, names in (("missing", missing), ("not in this model", extra), ("other shape:", reshaped))
        if names
    ]
    if faults:
        raise UserError(f"{where}: its tensors do not fit its configuration: {'; '.join(faults)}")


def _some(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not readable as safetensors ({error})") from error
