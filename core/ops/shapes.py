"""Check the shapes of tensors, because broadcasting would hide that they do not fit."""

from torch import Tensor


def check_shapes(axes: str, *tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape, with as many axes as "T, B" names, none of them empty."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].ndim != axes.count(",") + 1 or 0 in tensors[0].shape:
        raise ValueError(f"tensors must be [{axes}] of one shape, not {sorted(shapes)}")
