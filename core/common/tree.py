"""Apply functions to nested tuples of tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same structure with every tensor replaced by `function(tensor)`.

    Args:
        function: Applied to each tensor.
        tree: A tensor, None, or nested tuples of these; named tuples keep their type.
    """
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else function(tree)
    children = [tree_map(function, child) for child in tree]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def tree_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of a nested tuple, in order."""
    if tree is None or isinstance(tree, Tensor):
        return [] if tree is None else [tree]
    return [leaf for child in tree for leaf in tree_leaves(child)]
