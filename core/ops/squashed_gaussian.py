"""Gaussians squashed by tanh into -1 .. 1 (SAC: 1801.01290, appendix C; 1812.05905)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def squashed_gaussian(means: Tensor, deviations: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a = tanh(u), u = mean + deviation * normal, and the logarithm of its density, by the change of variables.

        log pi(a) = sum_i log N(u_i) - log(1 - tanh(u_i)^2),    log(1 - tanh(u)^2) = 2 (log 2 - u - log(1 + e^-2u))

    Args:
        means: [B, A].
        deviations: [B, A], above 0.
        normal: [B, A] unit Gaussian.

    Returns:
        a [B, A] and log pi [B], both differentiable.

    Raises:
        ValueError: The shapes differ.
    """
    if means.ndim != 2 or not means.shape == deviations.shape == normal.shape:
        shapes = f"{tuple(means.shape)}, {tuple(deviations.shape)}, {tuple(normal.shape)}"
        raise ValueError(f"means, deviations and normal must be [B, A] of one shape, not {shapes}")
    unsquashed = means + deviations * normal
    density = -0.5 * normal.square() - deviations.log() - 0.5 * math.log(2 * math.pi)
    return torch.tanh(unsquashed), (density - log_tanh_derivative(unsquashed)).sum(1)


def log_tanh_derivative(unsquashed: Tensor) -> Tensor:
    """Compute log(1 - tanh(u)^2), finite for every finite u."""
    return 2 * (math.log(2) - unsquashed - F.softplus(-2 * unsquashed))
