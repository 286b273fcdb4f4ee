"""Distances between new and old features of the same states, for elite replay.

Each function takes features [T, N, F] of N unrolls and returns [N], without gradient. All have one signature, so that
DISTANCES can be looked up by the name that users give; p belongs to ln_norm alone. Shapes that differ raise ValueError.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from core.ops.policy_losses import kl
from core.types import check_shapes


@torch.no_grad()
def ln_norm(new: Tensor, old: Tensor, p: float) -> Tensor:
    """Compute the p-norm of the difference over [T, F], (sum |new - old|^p)^(1/p), p > 0."""
    check_shapes("T, N, F", new, old)
    distances: Tensor = torch.linalg.vector_norm(new - old, p, dim=(0, 2))
    return distances


@torch.no_grad()
def cos_dist(new: Tensor, old: Tensor, p: float) -> Tensor:
    """Compute 1 - cosine of the flattened [T * F] vectors, in 0 .. 2; p is ignored.

    The distance of a zero vector is 1 from any other vector and 0 from a zero vector.
    """
    check_shapes("T, N, F", new, old)
    lengths = [torch.linalg.vector_norm(features, dim=(0, 2), keepdim=True) for features in (new, old)]  # [1, N, 1]
    units = [features / torch.where(length == 0, 1.0, length) for features, length in zip((new, old), lengths)]
    both_zero = ((lengths[0] == 0) & (lengths[1] == 0)).flatten()  # [N]
    distances = (1 - (units[0] * units[1]).sum((0, 2))).clamp(0, 2)  # rounding may leave the interval
    return torch.where(both_zero, 0.0, distances)


@torch.no_grad()
def kl_div(new: Tensor, old: Tensor, p: float) -> Tensor:
    """Compute sum_t KL(softmax new_t || softmax old_t), with the softmax over the features; p is ignored."""
    check_shapes("T, N, F", new, old)
    return kl(new, old).sum(0)


DISTANCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "ln_norm": ln_norm,
    "cos_dist": cos_dist,
    "kl_div": kl_div,
}
