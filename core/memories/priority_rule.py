"""Proportional prioritised replay (1511.05952): priorities, draws and weights, written once for the CPU and a device.

A start i is drawn with probability P(i) = p_i^alpha / sum_k p_k^alpha, where p_i = |td_i| + epsilon. The number
p_i^alpha is called its leaf.

- Draws are stratified: one from each of B equal parts of the sum of all leaves.
- Importance weights are w_i = (N P(i))^-beta / max_j w_j over the batch (section 3.4, algorithm 1). N and the sum of
  all leaves cancel against the largest weight. beta is annealed linearly.
- Deviation: a new start takes the priority that its actor computed (Ape-X, 1803.00933). An actor that supplies none
  leaves NaN, and the start takes the largest priority seen, as in the paper.
- With a stride, a start is that of a sequence instead of a step.
"""

from typing import Any, Generic

import numpy as np
import torch

from core.trajectory.window_gather import Array


class PriorityRule(Generic[Array]):
    """The arithmetic of priorities, on numpy arrays or on tensors of one device.

    Arrays are float64. Python reads no value of a tensor, so that CUDA graphs can capture every method.
    """

    def __init__(self, params: Any, largest: Array):
        """Bind the rule to a kind of arrays.

        Args:
            params: The settings, PrioritizedParams.
            largest: The largest priority seen, a scalar array that is changed in place; 1 at first.
        """
        self._params = params
        self.largest: Array = largest

    @property
    def _library(self) -> Any:
        """Return the module whose arrays are used; a rule cannot keep it, because modules cannot be pickled."""
        return np if isinstance(self.largest, np.ndarray) else torch

    def beta(self, batch: int) -> float:
        """Return the exponent of the importance weights of a batch, numbered from 0."""
        start, end, updates = self._params.beta_start, self._params.beta_end, self._params.beta_updates
        return float(start + (end - start) * min(batch / updates, 1.0))

    def fractions(self, uniform: Array) -> Array:
        """Return fractions of the sum of all leaves, one in each of B equal parts, of uniform numbers [B] in [0, 1)."""
        parts: Array = self._library.arange(len(uniform), device=uniform.device)
        fractions: Array = (parts + uniform) / len(uniform)
        return fractions

    def weights(self, leaves: Array, beta: Any) -> Array:
        """Return the importance weights [B] of starts with these leaves [B]."""
        weights: Array = (leaves / leaves.min()) ** -beta
        return weights

    def is_valid(self, priorities: Array) -> Array:
        """Return which priorities are finite and not negative, [B] bool."""
        valid: Array = self._library.isfinite(priorities) & (priorities >= 0)
        return valid

    def leaves(self, priorities: Array) -> Array:
        """Return the leaves of priorities [B]; an invalid priority counts as the largest one seen, these included."""
        valid = self.is_valid(priorities)
        highest = self._library.where(valid, priorities, 0.0).max()
        self.largest[...] = self._library.maximum(self.largest, highest)
        known: Array = self._library.where(valid, priorities, self.largest)
        leaves: Array = (known + self._params.priority_epsilon) ** self._params.alpha
        return leaves

    def first_leaves(self, priorities: Array, invalid_starts: Array) -> Array:
        """Return the leaves of new steps [B], 0 for those that are no starts."""
        leaves: Array = self._library.where(invalid_starts, 0.0, self.leaves(priorities))
        return leaves
