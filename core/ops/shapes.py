"""Check the shapes of tensors, because broadcasting would hide that they do not fit."""

from torch import Tensor


def check_shapes(axes: str, *tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape, with as many axes as "T, B" names, none of them empty."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].ndim != axes.count(",") + 1 or 0 in tensors[0].shape:
        raise ValueError(f"tensors must be [{axes}] of one shape, not {sorted(shapes)}")


def check_scalar(name: str, value: object) -> None:
    """Raise ValueError unless the value of this name is a scalar tensor."""
    if not isinstance(value, Tensor) or value.dim():
        found = f"a tensor of shape {[*value.shape]}" if isinstance(value, Tensor) else f"of {type(value)}"
        raise ValueError(f"{name} is {found}, expected a scalar tensor")
