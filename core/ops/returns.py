"""N-step returns of windows and sequences."""

import torch
from torch import Tensor


def n_step_return(rewards: Tensor, discounts: Tensor, lasts: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute the n-step return and the discount of the value it bootstraps from (Sutton & Barto, equation 12.1).

        R = sum_{k<n} (prod_{j<k} gamma d_j) r_k,    D = prod_{k<n} gamma d_k

    Step k counts unless it or a step before it is `last`: the n-step return stops at the end of an episode. A window
    cut there bootstraps from the step that `bootstrap_position` names.

    Args:
        rewards: [n + 1, B] float.
        discounts: [n + 1, B] float d.
        lasts: [n + 1, B] bool.
        gamma: Discount of a step.

    Returns:
        R [B] and D [B]; the target is R + D * bootstrap.
    """
    _check_time_major(rewards, discounts, lasts)
    ended = lasts[:-1].cumsum(0) > 0  # [n, B]
    products = (gamma * discounts[:-1]).masked_fill(ended, 1.0).cumprod(0)  # [n, B]
    rewards = rewards[:-1].masked_fill(ended, 0.0)  # [n, B]
    if len(rewards) == 1:
        return rewards[0], products[0]
    return rewards[0] + (products[:-1] * rewards[1:]).sum(0), products[-1]


def bootstrap_position(lasts: Tensor) -> Tensor:
    """Return the step of each window [n + 1, B] that n_step_return bootstraps from, [B] int64.

    It is the first `last` step, else step n.
    """
    padded = lasts.clone()
    padded[-1] = True
    return padded.to(torch.uint8).argmax(0)


def n_step_targets(
    rewards: Tensor, discounts: Tensor, lasts: Tensor, values: Tensor, gamma: float, n_step: int
) -> Tensor:
    """Compute R + D * bootstrap, as n_step_return defines them, of every step that has n steps after it.

    Args:
        rewards: [T + n, B] float.
        discounts: [T + n, B] float.
        lasts: [T + n, B] bool.
        values: [T + n, B] of the steps' own states.
        gamma: Discount of a step.
        n_step: Steps n of the return.

    Returns:
        [T, B] targets; those of `last` steps are undefined.
    """
    _check_time_major(rewards, discounts, lasts, values)
    sizes = len(rewards) - n_step, rewards.shape[1]
    rewards, discounts, lasts, values = (  # each [n + 1, T * B]
        tensor.unfold(0, n_step + 1, 1).movedim(-1, 0).flatten(1) for tensor in (rewards, discounts, lasts, values)
    )
    returns, bootstrap_discounts = n_step_return(rewards, discounts, lasts, gamma)
    bootstrap = values.gather(0, bootstrap_position(lasts)[None])[0]  # [T * B]
    return torch.unflatten(returns + bootstrap_discounts * bootstrap, 0, sizes)


def _check_time_major(*tensors: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].ndim != 2 or len(tensors[0]) < 2:
        raise ValueError(f"windows must be [n + 1, B] of one shape with n >= 1, not {sorted(shapes)}")
