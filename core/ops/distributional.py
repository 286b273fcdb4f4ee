"""Learning the distribution of returns: C51 (1707.06887) and quantile regression (1710.10044).

Time-free: [B, N] is a distribution of N atoms for each of B samples, a loss is [B]. Gradients flow into what is being learnt only. Shapes
that differ raise ValueError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def categorical_projection(probabilities: Tensor, returns: Tensor, factors: Tensor, v_min: float, v_max: float) -> Tensor:
    """The distribution of R + D Z on Z's own atoms z_i = v_min + i (v_max - v_min) / (N - 1) (1707.06887, eq. 7 and algorithm 1).

        b_j = clip((R + D z_j - v_min) / (z_1 - z_0), 0, N - 1),    m_i = sum_j p_j max(0, 1 - |b_j - i|)

    which gives the mass of atom j to the neighbours of b_j, all of it to one where b_j is whole. probabilities p [B, N] with N > 1,
    returns R and factors D [B], as n_step_return gives them, and v_min < v_max. Returns m [B, N].
    """
    _assert_distributions(probabilities)
    _assert_samples(probabilities, returns, factors)
    num_atoms = probabilities.shape[1]
    if num_atoms < 2 or not v_min < v_max:
        raise ValueError(f"a support needs two atoms and v_min < v_max, not {num_atoms} in {v_min} .. {v_max}")
    positions = torch.arange(num_atoms, device=returns.device, dtype=probabilities.dtype)  # [N] of the atoms, in steps from v_min
    step = (v_max - v_min) / (num_atoms - 1)
    shift = (returns + (factors - 1) * v_min) / step  # [B]: (R + D z_j - v_min) / step = shift + D j
    moved = (shift[:, None] + factors[:, None] * positions).clamp(0, num_atoms - 1)  # [B, N] b
    below = moved.nan_to_num().floor().clamp(max=num_atoms - 2)  # [B, N] neighbours are below and below + 1; NaN stays NaN
    upper, places = moved - below, below.long()
    projected = torch.zeros_like(probabilities).scatter_add_(1, places, probabilities * (1 - upper))
    return projected.scatter_add_(1, places + 1, probabilities * upper)


def categorical_mean(logits: Tensor, v_min: float, v_max: float) -> Tensor:
    """sum_i p_i z_i of softmax logits [..., N] on the atoms of categorical_projection. Returns [...]."""
    return logits.softmax(-1) @ torch.linspace(v_min, v_max, logits.shape[-1], device=logits.device, dtype=logits.dtype)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """- sum_i m_i log p_i, p the softmax of logits [B, N], m the target's probabilities [B, N] (1707.06887, algorithm 1). Returns [B]."""
    _assert_distributions(logits, target)
    return -(target.detach() * torch.log_softmax(logits, -1)).sum(-1)


def kl_loss(logits: Tensor, target: Tensor) -> Tensor:
    """KL(m || p): the cross entropy less the target's own entropy, so its gradient is the same (1710.02298, section 3). Returns [B]."""
    _assert_distributions(logits, target)
    return cross_entropy(logits, target) + torch.xlogy(target, target).sum(-1).detach()


def quantile_huber_loss(quantiles: Tensor, target: Tensor, kappa: float) -> Tensor:
    """sum_i mean_j |tau_i - 1[u_ij < 0]| L_kappa(u_ij), u_ij = target_j - quantile_i, tau_i = (2 i + 1) / 2 N (1710.10044, eq. 10).

    L_kappa(u) = u^2 / 2 where |u| <= kappa, else kappa (|u| - kappa / 2): not divided by kappa, as IQN later did (1806.06923, eq. 3).
    quantiles [B, N], target [B, M] of any number of equally likely atoms, kappa > 0. Returns [B].
    """
    _assert_distributions(quantiles)
    _assert_distributions(target)
    _assert_samples(quantiles, target[:, 0])
    num = quantiles.shape[1]
    fractions = (torch.arange(num, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / num  # [N] tau
    errors = target.detach()[:, None, :] - quantiles[:, :, None]  # [B, N, M]
    huber = F.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=kappa)
    weights = (fractions[:, None] - (errors < 0).to(errors.dtype)).abs()
    return (weights * huber).mean(2).sum(1)


def _assert_distributions(*tensors: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].ndim != 2:
        raise ValueError(f"distributions must be [B, N] of one shape, not {sorted(shapes)}")


def _assert_samples(distributions: Tensor, *tensors: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if shapes != {(len(distributions),)}:
        raise ValueError(f"there must be one value for each of {len(distributions)} distributions, not {sorted(shapes)}")
