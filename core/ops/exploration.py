"""How agents depart from what they think best: random actions, and noise on continuous ones."""

import numpy as np


def linear(step: int, start: float, end: float, steps: int) -> float:
    """From start to end over `steps`, then constant."""
    return start + (end - start) * min(step / steps, 1.0)


def ladder(num: int, base: float, alpha: float) -> np.ndarray:
    """Ape-X (1803.00933, section 4): epsilon_i = base ^ (1 + alpha i / (N - 1)) for i = 0 .. N - 1. Returns [N] float64."""
    steps = np.arange(num) / max(num - 1, 1)
    return base ** (1 + alpha * steps)


def epsilon_greedy(greedy: np.ndarray, num_actions: int, epsilon: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Replace greedy actions [E] by uniform ones with probability epsilon [E]."""
    explore = generator.random(len(greedy)) < epsilon
    return np.where(explore, generator.integers(num_actions, size=len(greedy)), greedy)


def geometric(num: int, last: float) -> np.ndarray:
    """last ^ (i / (N - 1)) for i = 0 .. N - 1: from 1 to `last` in equal ratios. Returns [N] float64."""
    return last ** (np.arange(num) / max(num - 1, 1))


def ornstein_uhlenbeck(state: np.ndarray, theta: float, sigma: np.ndarray, dt: float, normal: np.ndarray) -> np.ndarray:
    """A step of length dt of dx = - theta x dt + sigma dW (Uhlenbeck & Ornstein 1930; DDPG: 1509.02971, section 7), by Euler and Maruyama.

    state x and unit Gaussian `normal` [E, A], sigma [E, 1]. Returns the next x [E, A].
    """
    return state - theta * state * dt + sigma * np.sqrt(dt) * normal
