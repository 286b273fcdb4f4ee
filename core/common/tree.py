"""Apply functions to nested tuples and dictionaries of tensors or arrays."""

from collections.abc import Callable
from typing import Any


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the same structure with every leaf replaced by `function(leaf, *leaves)`.

    Args:
        function: Applied to each leaf and to the leaves at its place in the other trees.
        tree: A tensor or array, None, or nested tuples and dictionaries of these. None stays None, and named tuples
            keep their type.
        others: Trees of the same structure.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {name: tree_map(function, child, *(other[name] for other in others)) for name, child in tree.items()}
    if isinstance(tree, tuple | list):
        children = [tree_map(function, *parts) for parts in zip(tree, *others, strict=True)]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return function(tree, *others)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    leaves = list[Any]()
    tree_map(leaves.append, tree)
    return leaves
