"""Policies and values of legal actions only."""

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


def mask_actions_of_arrays(scores: np.ndarray, legal: np.ndarray | None) -> np.ndarray:
    """Do what `mask_actions` does, for numpy arrays."""
    if legal is None:
        return scores
    count = legal.shape[-1]
    masked = np.where(legal, scores[..., :count], np.finfo(scores.dtype).min)
    return masked if scores.shape[-1] == count else np.concatenate([masked, scores[..., count:]], -1)
