"""Losses of actor-critic agents.

- Tensors are time-major and finite.
- A loss is a scalar, the SUM over the steps [T, B] whose mask is True, as in IMPALA (1802.01561) and its code.
- Gradients flow into the logits, values and log_probs of the policy being learnt only.
- Shapes that differ raise ValueError.
"""

import math

import torch
from torch import Tensor

from core.types import check_shapes

MAX_LOG_RATIO = 20.0  # so that one step that has become much likelier cannot make a whole update non-finite


def log_probs_of(logits: Tensor, actions: Tensor) -> Tensor:
    """Compute log pi(a) [T, B].

    Args:
        logits: [T, B, A].
        actions: [T, B] int64, in 0 .. A - 1 in every step, masked or not.
    """
    check_shapes("T, B, A", logits)
    check_shapes("T, B", logits[..., 0], actions)
    return torch.log_softmax(logits, -1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """Compute KL(p || q) = sum_a p(a) (log p(a) - log q(a)) [T, B] of logits [T, B, A]."""
    check_shapes("T, B, A", logits_p, logits_q)
    log_p, log_q = torch.log_softmax(logits_p, -1), torch.log_softmax(logits_q, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def entropies_of(logits: Tensor) -> Tensor:
    """Compute - sum_a p(a) log p(a) [T, B] of logits [T, B, A]."""
    check_shapes("T, B, A", logits)
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute - sum log pi(a) A (1802.01561, section 4.2).

    Args:
        log_probs: [T, B] log pi(a).
        advantages: [T, B] A, as `vtrace` returns them.
        mask: [T, B] bool.
    """
    check_shapes("T, B", log_probs, advantages, mask)
    return masked_sum(-log_probs * advantages.detach(), mask)


def baseline_loss(values: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Compute 0.5 sum (target - V)^2. All arguments are [T, B].

    The paper's gradient has no factor 2, so the half is that of IMPALA's own code (scalable_agent).
    """
    check_shapes("T, B", values, targets, mask)
    return 0.5 * masked_sum((targets.detach() - values) ** 2, mask)


def value_cloning_loss(values: Tensor, behaviour_values: Tensor, mask: Tensor) -> Tensor:
    """Compute sum (V - V_replay)^2, without a half, over replayed steps (CLEAR, 1811.11682, section 3).

    All arguments are [T, B].
    """
    check_shapes("T, B", values, behaviour_values, mask)
    return masked_sum((values - behaviour_values.detach()) ** 2, mask)


def clipped_surrogate(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    target_log_probs: Tensor,
    advantages: Tensor,
    epsilon: float,
    beta_max: float = 2.0,
) -> Tensor:
    """Compute IMPACT's objective (1912.00167) [T, B], to be maximised and not yet masked.

        beta = clip(mu / pi_target, 0, beta_max),    r = beta pi / mu,    min(r A, clip(r, 1 - epsilon, 1 + epsilon) A)

    The gradient flows through pi alone. log r is at most MAX_LOG_RATIO.

    Args:
        log_probs: [T, B] of the taken actions by the learner, pi.
        behaviour_log_probs: [T, B] by the worker, mu.
        target_log_probs: [T, B] by the target, pi_target.
        advantages: [T, B] A.
        epsilon: Half width of the clip around 1.
        beta_max: Clip of mu / pi_target.
    """
    check_shapes("T, B", log_probs, behaviour_log_probs, target_log_probs, advantages)
    mu, target, advantages = behaviour_log_probs.detach(), target_log_probs.detach(), advantages.detach()
    log_ratios = (mu - target).clamp(max=math.log(beta_max)) + log_probs - mu  # as a sum, because exp(-mu) can be inf
    ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp()
    return torch.minimum(ratios * advantages, ratios.clamp(1 - epsilon, 1 + epsilon) * advantages)


def clipped_policy_loss(log_ratios: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """Compute PPO's loss (1707.06347, equation 7), -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), not yet summed.

    The minimum clips r from above where A is positive, and from below where A is negative. So one clip with bounds of
    each step takes half of the operators.

    Args:
        log_ratios: [T, B] log r = log pi(a) / mu(a).
        advantages: [T, B] A.
        epsilon: Half width of the clip around 1.
    """
    check_shapes("T, B", log_ratios, advantages)
    advantages = advantages.detach()
    lowest = torch.zeros_like(advantages).masked_fill_(advantages < 0, 1 - epsilon)
    highest = torch.full_like(advantages, torch.inf).masked_fill_(advantages > 0, 1 + epsilon)
    return log_ratios.exp().clamp(lowest, highest) * -advantages


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """Compute 0.5 max((V - v)^2, (V' - v)^2), V' = V_old + clip(V - V_old, -epsilon, epsilon), not yet summed.

    The loss is that of the PPO authors' code (openai/baselines, ppo2); the paper does not have it. All tensors are
    [T, B].

    Where the clipped error is the larger one it is a constant, so the gradient is that of the other error alone.
    """
    check_shapes("T, B", values, old_values, targets)
    targets = targets.detach()
    losses = 0.5 * (values - targets).square()
    with torch.no_grad():
        moved = values - old_values
        clipped_losses = 0.5 * (old_values + moved.clamp(-epsilon, epsilon) - targets).square()
        is_clipped = (moved.abs() > epsilon) & (clipped_losses > losses)
    return torch.where(is_clipped, clipped_losses, losses)


@torch.no_grad()
def adapted_kl_coefficient(coefficient: Tensor, measured: Tensor, target: float) -> Tensor:
    """Double the coefficient where the measured KL is above 1.5 target, halve it where the KL is below target / 1.5.

    This is PPO's rule (1707.06347, section 4). RLlib's PPO has another (x 1.5 above 2 target, x 0.5 below target / 2).
    `coefficient` and `measured` have one shape, which may be that of a scalar.
    """
    if coefficient.shape != measured.shape:
        shapes = f"{tuple(coefficient.shape)} and {tuple(measured.shape)}"
        raise ValueError(f"coefficient and measured must be of one shape, not {shapes}")
    lowered = torch.where(measured < target / 1.5, coefficient / 2, coefficient)
    return torch.where(measured > 1.5 * target, coefficient * 2, lowered)


def masked_sum(terms: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of terms [T, B] over the steps whose mask [T, B] is True."""
    check_shapes("T, B", terms, mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask is bool, not {mask.dtype}")
    return torch.where(mask, terms, 0.0).sum()
