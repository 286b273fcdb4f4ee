"""Returns of a window."""

import torch
from torch import Tensor


def n_step_return(rewards: Tensor, discounts: Tensor, lasts: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The discounted reward of a window's steps and the factor of the value it bootstraps from (Sutton & Barto, eq. 12.1).

        R = sum_{k<n} (prod_{j<k} gamma d_j) r_k,    D = prod_{k<n} gamma d_k

    rewards, discounts [n + 1, B] float, lasts [n + 1, B] bool. Row k is a step unless it or a row before it is `last`: the n-step
    return stops at the end of an episode, and a window cut there has bootstrap_position's row to bootstrap from.
    Returns R [B] and D [B]; the target is R + D * bootstrap.
    """
    _assert_time_major(rewards, discounts, lasts)
    over = lasts[:-1].cumsum(0) > 0  # [n, B]
    factors = (gamma * discounts[:-1]).masked_fill(over, 1.0).cumprod(0)  # [n, B]
    earned = rewards[:-1].masked_fill(over, 0.0)  # [n, B]
    if len(earned) == 1:
        return earned[0], factors[0]
    return earned[0] + (factors[:-1] * earned[1:]).sum(0), factors[-1]


def bootstrap_position(lasts: Tensor) -> Tensor:
    """Row of each window [n + 1, B] that n_step_return bootstraps from: the first `last` one, else row n. Returns [B] int64."""
    padded = lasts.clone()
    padded[-1] = True
    return padded.to(torch.uint8).argmax(0)


def n_step_targets(rewards: Tensor, discounts: Tensor, lasts: Tensor, values: Tensor, gamma: float, nstep: int) -> Tensor:
    """R + D * bootstrap of every row of a sequence that has n rows after it, as n_step_return defines them.

    All [T + n, B]; `values` are those of the rows' own states. Returns [T, B]; of rows that are `last` it says nothing.
    """
    _assert_time_major(rewards, discounts, lasts, values)
    rows = len(rewards) - nstep, rewards.shape[1]
    rewards, discounts, lasts, values = (tensor.unfold(0, nstep + 1, 1).movedim(-1, 0).flatten(1)  # each [n + 1, T * B]
                                         for tensor in (rewards, discounts, lasts, values))
    returns, factors = n_step_return(rewards, discounts, lasts, gamma)
    bootstrap = values.gather(0, bootstrap_position(lasts)[None])[0]  # [T * B]
    return (returns + factors * bootstrap).unflatten(0, rows)


def _assert_time_major(*tensors: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].ndim != 2 or len(tensors[0]) < 2:
        raise ValueError(f"windows must be [n + 1, B] of one shape with n >= 1, not {sorted(shapes)}")
