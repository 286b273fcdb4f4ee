"""Masks of legal actions, and departures from the greedy action: random actions, and noise on continuous actions."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def mask_actions(scores: Tensor, legal: Tensor | None) -> Tensor:
    """Replace the scores of illegal actions by the lowest float, which any policy gives the probability 0.

    Probabilities of exactly 0 have no gradient (2006.14171). The float is finite because entropies and divergences
    multiply the probability by its logarithm, and 0 * -inf is NaN.

    Args:
        scores: [..., A] logits or action values; behind logits also other parameters of the policy, which stay.
        legal: [..., A] bool. If None, all actions are legal.
    """
    if legal is None:
        return scores
    count = legal.shape[-1]
    masked = torch.where(legal, scores[..., :count], torch.finfo(scores.dtype).min)
    return masked if scores.shape[-1] == count else torch.cat([masked, scores[..., count:]], -1)


def linear(step: int, start: float, end: float, steps: int) -> float:
    """Interpolate from start to end over `steps`, then stay at end."""
    return start + (end - start) * min(step / steps, 1.0)


def ladder(num: int, base: float, alpha: float) -> np.ndarray:
    """Compute Ape-X's epsilons (1803.00933, section 4), [N] float64.

    epsilon_i = base ^ (1 + alpha i / (N - 1)) for i = 0 .. N - 1.
    """
    steps = np.arange(num) / max(num - 1, 1)
    return base ** (1 + alpha * steps)


def epsilon_greedy(
    greedy: np.ndarray,
    num_actions: int,
    epsilon: np.ndarray,
    generator: np.random.Generator,
    legal: np.ndarray | None = None,
) -> np.ndarray:
    """Replace greedy actions [E] by uniform ones with probability epsilon [E].

    Args:
        greedy: [E] actions.
        num_actions: Number A of actions.
        epsilon: [E] probabilities.
        generator: Source of the draws.
        legal: [E, A] bool, the legal actions. If None, all actions are.
    """
    explore = generator.random(len(greedy)) < epsilon
    if legal is None:
        random = generator.integers(num_actions, size=len(greedy))
    else:
        random = random_legal_actions(legal, (num_actions,), generator)[:, 0]
    return np.where(explore, random, greedy)


def random_legal_actions(legal: np.ndarray, choices: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Draw a uniform legal action of each choice, [E, choices] int64.

    Args:
        legal: [E, sum of choices] bool, the legal actions of one choice after another.
        choices: Number of actions of each choice.
        generator: Source of the draws.
    """
    draws = np.where(legal, generator.random(legal.shape), -1.0)
    return np.stack([part.argmax(1) for part in np.split(draws, np.cumsum(choices)[:-1], 1)], 1)


def ornstein_uhlenbeck(state: np.ndarray, theta: float, sigma: np.ndarray, dt: float, normal: np.ndarray) -> np.ndarray:
    """Take an Euler-Maruyama step of length dt of dx = - theta x dt + sigma dW.

    Sources: Uhlenbeck & Ornstein 1930; DDPG, 1509.02971, section 7.

    Args:
        state: [E, A] x.
        theta: Pull towards 0.
        sigma: [E, 1].
        dt: Length of the step.
        normal: [E, A] unit Gaussian.

    Returns:
        [E, A] the next x.
    """
    after: np.ndarray = state - theta * state * dt + sigma * np.sqrt(dt) * normal
    return after
