"""Targets of values: n-step returns, generalised advantages, Munchausen's bonus and bootstrap, rescaled returns.

Munchausen targets (2007.14430) add a bonus for likely actions, and bootstrap with the entropy of a soft policy:

    pi = softmax(q / t)
    target = r + alpha [t log pi(a | s)]_clip^0 + g sum_b pi(b | s') (z(s', b) - t log pi(b | s'))

For DQN z is q (M-DQN); for quantiles z (M-IQN) q is their mean. All values are those of the target network.

By rescaling of returns, one network learns rewards of every size without clipping (1805.11593, section 3.2). Both
functions avoid the differences of nearly equal numbers in the paper's form, so that float32 keeps its digits near 0.
"""

import torch
from torch import Tensor

from core.types import check_shapes


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
    check_shapes("n + 1, B", rewards, discounts, lasts)
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
    check_shapes("n + 1, B", rewards, discounts, lasts, values)
    sizes = len(rewards) - n_step, rewards.shape[1]
    rewards, discounts, lasts, values = (  # each [n + 1, T * B]
        tensor.unfold(0, n_step + 1, 1).movedim(-1, 0).flatten(1) for tensor in (rewards, discounts, lasts, values)
    )
    returns, bootstrap_discounts = n_step_return(rewards, discounts, lasts, gamma)
    bootstrap = values.gather(0, bootstrap_position(lasts)[None])[0]  # [T * B]
    return torch.unflatten(returns + bootstrap_discounts * bootstrap, 0, sizes)


@torch.no_grad()
def generalised_advantages(
    rewards: Tensor, discounts: Tensor, values: Tensor, included: Tensor, trace_lambda: float
) -> tuple[Tensor, Tensor]:
    """Compute GAE (1506.02438, equation 16) and the targets of the values, TD(lambda).

        delta_t = r_t + g_t V_{t+1} - V_t,    A_t = included_t (delta_t + g_t lambda A_{t+1}),    A_T = 0,    v = V + A

    A `last` step is excluded because it has no action: the trace stops there, and the step before it bootstraps from
    its value, that of the episode's true final observation. Its reward is not read.

    Args:
        rewards: [T, B] float r.
        discounts: [T, B] float g, gamma times the step's discount, 0 at termination.
        values: [T + 1, B] float V.
        included: [T, B] bool.
        trace_lambda: Factor of the trace.

    Returns:
        A [T, B] and v [T, B].
    """
    check_shapes("T, B", rewards, discounts, included, values[:-1])
    deltas = torch.where(included, rewards + discounts * values[1:] - values[:-1], 0.0)
    traces = torch.where(included, discounts * trace_lambda, 0.0)
    advantages = [torch.zeros_like(values[-1])]  # A_T, A_{T-1} .. A_0, each [B]
    for delta, trace in zip(reversed(deltas.unbind()), reversed(traces.unbind())):
        advantages.append(torch.addcmul(delta, trace, advantages[-1]))
    stacked = torch.stack(advantages[:0:-1])
    return stacked, values[:-1] + stacked


def munchausen_bonus(values: Tensor, actions: Tensor, alpha: float, temperature: float, clip: float) -> Tensor:
    """Compute alpha [t log pi(a | s)]_clip^0 [B].

    Args:
        values: [B, A] q of the states.
        actions: [B] int64 actions taken.
        alpha: Weight of the bonus.
        temperature: t, above 0.
        clip: Smallest scaled logarithm, at most 0.
    """
    logarithms = scaled_log_policy(values, temperature).gather(1, actions[:, None])[:, 0]
    return alpha * logarithms.clamp(clip, 0.0)


def soft_bootstrap(values: Tensor, outputs: Tensor, temperature: float) -> Tensor:
    """Compute sum_b pi(b) (z_b - t log pi(b)) [B, ...].

    Args:
        values: [B, A] q.
        outputs: [B, A, ...] z: q itself, or quantiles of each action.
        temperature: t, above 0.
    """
    if outputs.shape[:2] != values.shape or values.dim() != 2:
        raise ValueError(f"outputs must begin with the shape of values [B, A]: {[*outputs.shape]}, {[*values.shape]}")
    logarithms = scaled_log_policy(values, temperature)
    shape = (*values.shape, *[1] * (outputs.dim() - 2))
    policy = torch.softmax(values / temperature, 1).view(shape)
    terms = policy * (outputs - logarithms.view(shape))
    return torch.where(policy > 0, terms, 0.0).sum(1)  # the logarithms of illegal actions may be -inf


def scaled_log_policy(values: Tensor, temperature: float) -> Tensor:
    """Compute t log pi [B, A] of the policy softmax(values / t)."""
    return temperature * torch.log_softmax(values / temperature, 1)


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
