"""Functions over nested tuples of tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tree_map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A tensor, or nested tuples of tensors, named or not, with function(tensor) in the place of each."""
    if isinstance(value, Tensor):
        return function(value)
    parts = [tree_map(function, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of such a value, in order."""
    return [value] if isinstance(value, Tensor) else [leaf for part in value for leaf in leaves(part)]
