"""Losses of distributions of returns: C51 (1707.06887), quantile regression (1710.10044) and IQN (1806.06923).

- [B, N] is a distribution of N atoms for each of B samples, without a time dimension; a loss is [B].
- Gradients flow into the learnt distribution only.
- Shapes that differ raise ValueError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.types import check_shapes


@torch.no_grad()
def categorical_projection(
    probabilities: Tensor, returns: Tensor, discounts: Tensor, v_min: float, v_max: float
) -> Tensor:
    """Project the distribution of R + D Z onto the atoms of Z (1707.06887, equation 7 and algorithm 1).

        z_i = v_min + i (v_max - v_min) / (N - 1)
        b_j = clip((R + D z_j - v_min) / (z_1 - z_0), 0, N - 1),    m_i = sum_j p_j max(0, 1 - |b_j - i|)

    The mass of atom j goes to the neighbours of b_j, all of it to one atom where b_j is whole.

    Args:
        probabilities: [B, N] p, with N > 1.
        returns: [B] R, as n_step_return gives it.
        discounts: [B] D, as n_step_return gives it.
        v_min: Return of the first atom.
        v_max: Return of the last atom, above v_min.

    Returns:
        [B, N] m.
    """
    check_shapes("B, N", probabilities)
    check_shapes("B", probabilities[:, 0], returns, discounts)
    num_atoms = probabilities.shape[1]
    if num_atoms < 2 or not v_min < v_max:
        raise ValueError(f"a support needs two atoms and v_min < v_max, not {num_atoms} in {v_min} .. {v_max}")
    indices = torch.arange(num_atoms, device=returns.device, dtype=probabilities.dtype)  # [N] j
    step = (v_max - v_min) / (num_atoms - 1)
    shift = (returns + (discounts - 1) * v_min) / step  # [B]: (R + D z_j - v_min) / step = shift + D j
    positions = (shift[:, None] + discounts[:, None] * indices).clamp(0, num_atoms - 1)  # [B, N] b
    # The neighbours are lower and lower + 1. A NaN goes into both shares, so the projection stays NaN.
    lower = positions.nan_to_num().floor().clamp(max=num_atoms - 2)  # [B, N]
    upper_share, lower_atoms = positions - lower, lower.long()
    projected = torch.zeros_like(probabilities).scatter_add_(1, lower_atoms, probabilities * (1 - upper_share))
    return projected.scatter_add_(1, lower_atoms + 1, probabilities * upper_share)


def categorical_mean(logits: Tensor, v_min: float, v_max: float) -> Tensor:
    """Compute sum_i p_i z_i [...] of softmax logits [..., N] on the atoms of categorical_projection."""
    atoms = torch.linspace(v_min, v_max, logits.shape[-1], device=logits.device, dtype=logits.dtype)
    return logits.softmax(-1) @ atoms


def kl_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Compute KL(m || p) = sum_i m_i (log m_i - log p_i) [B] (1710.02298, section 3).

    It is the cross entropy (1707.06887, algorithm 1) less the target's own entropy, so both have the same gradient.

    Args:
        logits: [B, N], whose softmax is p.
        target: [B, N] probabilities m.
    """
    check_shapes("B, N", logits, target)
    return F.kl_div(torch.log_softmax(logits, -1), target.detach(), reduction="none").sum(-1)


def quantile_huber_loss(quantiles: Tensor, target: Tensor, kappa: float) -> Tensor:
    """Compute the quantile Huber loss [B] (1710.10044, equation 10).

        sum_i mean_j |tau_i - 1[u_ij < 0]| L_kappa(u_ij),    u_ij = target_j - quantile_i,    tau_i = (2 i + 1) / 2 N
        L_kappa(u) = u^2 / 2 where |u| <= kappa, else kappa (|u| - kappa / 2)

    L_kappa is not divided by kappa, as IQN later did (1806.06923, equation 3).

    Args:
        quantiles: [B, N].
        target: [B, M], any number of equally likely atoms.
        kappa: Error up to which the loss is squared, above 0.
    """
    check_shapes("B, N", quantiles)
    return _quantile_huber(quantiles, midpoints(quantiles.shape[1], quantiles), target, kappa)


def implicit_quantile_loss(quantiles: Tensor, fractions: Tensor, target: Tensor, kappa: float) -> Tensor:
    """Compute the loss [B] of quantiles at sampled fractions (1806.06923, equation 3).

        sum_i mean_j |tau_i - 1[u_ij < 0]| L_kappa(u_ij) / kappa,    with u and L_kappa of quantile_huber_loss

    Args:
        quantiles: [B, N].
        fractions: [B, N] tau in 0 .. 1, at which the quantiles were computed.
        target: [B, M], any number of equally likely atoms.
        kappa: Error up to which the loss is squared, above 0.
    """
    check_shapes("B, N", quantiles, fractions)
    return _quantile_huber(quantiles, fractions, target, kappa) / kappa


def midpoints(number: int, like: Tensor) -> Tensor:
    """Return the middles [N] of N equal parts of 0 .. 1, with the device and dtype of `like`."""
    return (torch.arange(number, device=like.device, dtype=like.dtype) + 0.5) / number


def _quantile_huber(quantiles: Tensor, fractions: Tensor, target: Tensor, kappa: float) -> Tensor:
    """Compute quantile_huber_loss with fractions [N] or [B, N]."""
    check_shapes("B, N", target)
    check_shapes("B", quantiles[:, 0], target[:, 0])
    errors = target.detach()[:, None, :] - quantiles[:, :, None]  # [B, N, M]
    huber = F.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=kappa)
    weights = (fractions[..., None] - (errors < 0).to(errors.dtype)).abs()
    return (weights * huber).mean(2).sum(1)
