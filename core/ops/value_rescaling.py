"""Rescaling of returns, by which one network learns rewards of every size without clipping (1805.11593, section 3.2).

Both functions avoid the differences of nearly equal numbers in the paper's form, so that float32 keeps its digits near
0.
"""

from torch import Tensor


def rescaled(values: Tensor, eps: float) -> Tensor:
    """Compute h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, element by element (proposition A.2)."""
    return values / ((values.abs() + 1).sqrt() + 1) + eps * values


def unrescaled(values: Tensor, eps: float) -> Tensor:
    """Compute the inverse of h, element by element (proposition A.2).

        h^-1(y) = sign(y) (((sqrt(1 + 4 eps (|y| + 1 + eps)) - 1) / (2 eps))^2 - 1) = s (|s| + 2)

    Here s, of the sign of y, solves eps s^2 + (1 + 2 eps) s = y for positive y: s = sign(x) (sqrt(|x| + 1) - 1) of the
    x sought.
    """
    slope = 1 + 2 * eps
    root = 2 * values / (slope + (slope * slope + 4 * eps * values.abs()).sqrt())
    return root * (root.abs() + 2)
