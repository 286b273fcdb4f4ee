"""Frozen pydantic dataclasses for options, and one sentence for each value that pydantic refuses.

A section of options is a `...Params` class. Each field declares type, default and bounds. The string below a field
explains the option on docs/options.md and in --help.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", validate_default=True)
REASONS = {  # pydantic's type of error -> what the value must be
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
}

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def frozen_dataclass(cls: type[T]) -> type[T]:
    """Make a class a frozen pydantic dataclass, which refuses values of another type or out of bounds."""
    return dataclass(cls, frozen=True, config=STRICT)  # type: ignore[return-value]


def combined(bases: tuple[type, ...], defaults: Mapping[str, Any], names: Mapping[str, str]) -> type:
    """Return a frozen dataclass with the fields of these, some of which have other defaults.

    Of fields with one name, that of the first base counts. `names` are `__module__` and `__qualname__` of the class.
    """
    fields: dict[str, Any] = {}
    for base in reversed(bases):
        fields |= base.__pydantic_fields__  # type: ignore[attr-defined]
    annotations = {name: Annotated[(fields[name].annotation, Field(), *fields[name].metadata)] for name in defaults}
    return frozen_dataclass(type("Params", bases, {**names, "__annotations__": annotations, **defaults}))


def _as_json(value: Any) -> Any:
    """Return dictionaries and lists as JSON; other values stay."""
    try:
        return json.dumps(value) if isinstance(value, (dict, list, tuple)) else value
    except (TypeError, ValueError):  # pydantic refuses the value, because it is no text
        return value


JsonText = Annotated[str, BeforeValidator(_as_json)]  # dictionaries and lists written in Python become JSON


def sentences(error: ValidationError, prefix: str = "") -> dict[str, str]:
    """Return what is wrong with each refused field: dotted name -> "name=value must be ..."."""
    values: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}
    for each in error.errors(include_url=False):
        name = f"{prefix}{each['loc'][0]}"
        values.setdefault(name, each["input"])
        reasons.setdefault(name, []).append(_reason(each["type"], each["msg"], each.get("ctx", {})))
    return {name: f"{name}={values[name]!r} {' or '.join(found)}" for name, found in reasons.items()}


def _reason(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return f"must be one of {context['expected']}".replace(" or ", ", ").replace("'", "")
    bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
    return REASONS[kind].format(**bounds) if kind in REASONS else re.sub(r"^\w+ should", "must", message)


def dotted(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
