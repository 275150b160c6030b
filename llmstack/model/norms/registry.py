"""The norm methods by name. A new method is one file here and one line in the tuple below."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from llmstack.errors import UserError
from llmstack.model.norms.bhyt import BHyT
from llmstack.model.norms.bhyt_star import BHyTStar
from llmstack.model.norms.layernorm import LayerNormMethod
from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.rmsnorm import RMSNormMethod

METHODS: dict[str, type[NormMethod]] = {
    method.name: method for method in (RMSNormMethod, LayerNormMethod, BHyT, BHyTStar)
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
    for field in fields(METHODS[name]):
        if field.name in values:
            _check_type(name, field.name, field.default, values[field.name])
    return METHODS[name](**values)


def _check_type(method: str, option: str, default: Any, value: Any) -> None:
    """An option has the type of its default: a switch, a number, or a whole number (default null)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, wanted = number, "a number"
    else:
        fits, wanted = value is None or (number and isinstance(value, int)), "a whole number or null"
    if not fits:
        raise UserError(f"norm {method}: {option} is {value!r}; it must be {wanted}")
