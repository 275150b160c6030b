"""The norm methods by name. A new method is one file here and one line in the tuple below."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llmstack.errors import UserError
from llmstack.model.norms.bhyt import BHyT
from llmstack.model.norms.bhyt_star import BHyTStar
from llmstack.model.norms.by_layer import ByLayer
from llmstack.model.norms.deep_norm import DeepNorm
from llmstack.model.norms.dyt import DynamicTanh
from llmstack.model.norms.fake_ln import FakeLNMethod
from llmstack.model.norms.layernorm import LayerNormMethod
from llmstack.model.norms.lns import LayerNormScaling
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.mix_ln import MixLN
from llmstack.model.norms.peri_ln import PeriLN
from llmstack.model.norms.post_ln import PostLN
from llmstack.model.norms.rmsnorm import RMSNormMethod
from llmstack.model.norms.taperln import AllTaperLN, InternalTaperLN
from llmstack.model.norms.tapernorm import AllTaper, InternalTaper

METHODS: dict[str, type[NormMethod]] = {
    method.name: method
    for method in (
        *(RMSNormMethod, LayerNormMethod, BHyT, BHyTStar, DynamicTanh, LayerNormScaling, PeriLN),
        *(PostLN, DeepNorm, MixLN, ByLayer),
        *(InternalTaper, AllTaper, InternalTaperLN, AllTaperLN, FakeLNMethod),
    )
}


def build_norm_method(options: dict[str, Any]) -> NormMethod:
    """The method that ``options`` (``method`` and its own options) describes.

    Raises:
        UserError: unknown method or option; the message lists the known ones.
    """
    values = dict(options)
    name = values.pop("method", None)
    if name not in METHODS:
        raise UserError(f"norm: unknown method '{name}' (there are: {', '.join(sorted(METHODS))})")
    known = [field.name for field in fields(METHODS[name])]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UserError(f"norm {name}: unknown option {', '.join(unknown)} (it has: {', '.join(known) or 'none'})")
    for option, wanted in _option_types(METHODS[name]).items():
        if option in values:
            _check_type(name, option, wanted, values[option])
    return METHODS[name](**values)


@cache
def _option_types(method: type[NormMethod]) -> dict[str, Any]:
    types = get_type_hints(method)
    return {field.name: types[field.name] for field in fields(method)}


def _check_type(method: str, option: str, wanted: Any, value: Any) -> None:
    """An option has the type that its method declares."""
    kinds = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    if not any(_fits(kind, value) for kind in kinds):
        choices = " or ".join(_described(kind) for kind in kinds)
        raise UserError(f"norm {method}: {option} is {value!r}; it must be {choices}")


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kind = get_origin(kind) or kind
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    names = {bool: "true or false", float: "a number", int: "a whole number", str: "text", dict: "a mapping"}
    return names.get(get_origin(kind) or kind, "null")
