"""Declaring and checking settings: one `setting(...)` a field, one `problems(...)` for all dataclasses.

Every Params dataclass of the framework is frozen and made of `setting` fields, so that bounds and choices stand beside
the default and one function can report everything that is wrong at once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

LARGEST = 1e300


def setting(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None,
            choices: tuple[Any, ...] | None = None) -> Any:
    """A dataclass field with bounds: low <= value <= high, value > above, or value in choices; of a tuple, each of its values."""
    metadata = {"low": low, "high": high, "above": above, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def problems(params: Any, prefix: str = "") -> list[str]:
    """Every violated bound of a dataclass and of the dataclasses inside it, one sentence each; empty when all is well."""
    found: list[str] = []
    for field in dataclasses.fields(params):
        name, value = f"{prefix}{field.name}", getattr(params, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found += problems(value, f"{name}.")
        elif value is not None and field.metadata:
            found += _violations(name, value, **field.metadata)
    return found


def dotted(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings as data, a dictionary in a dictionary, by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _violations(name: str, value: Any, low: float | None, high: float | None, above: float | None,
                choices: tuple[Any, ...] | None) -> list[str]:
    if choices is not None:
        return [] if value in choices else [f"{name}={value!r} must be one of {', '.join(map(str, choices))}"]
    if isinstance(value, tuple):
        return [found for each in value for found in _violations(name, each, low, high, above, choices)]
    if not isinstance(value, (int, float)):
        return []
    if not abs(value) < LARGEST:
        return [f"{name}={value!r} must be finite" + (f" and below {LARGEST:g}" if isinstance(value, int) else "")]
    if low is not None and value < low:
        return [f"{name}={value!r} must be at least {low}"]
    if above is not None and value <= above:
        return [f"{name}={value!r} must be greater than {above}"]
    if high is not None and value > high:
        return [f"{name}={value!r} must be at most {high}"]
    return []
