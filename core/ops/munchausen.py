"""Munchausen targets (2007.14430): a bonus for likely actions, and a bootstrap with the entropy of a soft policy.

    pi = softmax(q / t)
    target = r + alpha [t log pi(a | s)]_clip^0 + g sum_b pi(b | s') (z(s', b) - t log pi(b | s'))

For DQN z is q (M-DQN); for quantiles z (M-IQN) q is their mean. All values are those of the target network.
"""

import torch
from torch import Tensor


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
