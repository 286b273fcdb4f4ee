"""Parametrisations of which `make test` runs a part, and `make test-all` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values, all but the `quick` ones as parameters that are marked slow. Tuples are several arguments."""
    values = list(values)
    assert all(value in values for value in quick), "a quick value is no value"
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
