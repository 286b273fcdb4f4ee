"""Policies and values of legal actions only."""

import numpy as np
import torch
from torch import Tensor


def mask_actions(scores: Tensor, legal: Tensor | None) -> Tensor:
    """Replace the scores of illegal actions by the lowest float, which any policy gives the probability 0.

    Probabilities of exactly 0 have no gradient (2006.14171). The float is finite because entropies and divergences
    multiply the probability by its logarithm, and 0 * -inf is NaN.

    Args:
        scores: [..., A] logits or action values.
        legal: [..., A] bool. If None, all actions are legal.
    """
    return scores if legal is None else torch.where(legal, scores, torch.finfo(scores.dtype).min)


def mask_actions_of_arrays(scores: np.ndarray, legal: np.ndarray | None) -> np.ndarray:
    """Do what `mask_actions` does, for numpy arrays."""
    return scores if legal is None else np.where(legal, scores, np.finfo(scores.dtype).min)
