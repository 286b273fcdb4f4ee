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

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from core.device.transfers import on_device
from core.memories.sum_tree import SumTree
from core.memories.window_starts import WindowStarts
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
        """Return the importance weights [B] or [B, batches] of starts with these leaves, for each batch by itself."""
        weights: Array = (leaves / self._library.amin(leaves, 0)) ** -beta
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


class CumulativeLeaves:
    """Leaves on a device, all zero at first.

    A search runs two kernels, a running sum over all leaves and a search in it. A tree would run one for each level.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.leaves = torch.zeros(capacity, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        """Return the sum of all leaves, a scalar."""
        return self.leaves.sum()

    def set(self, indices: np.ndarray, values: np.ndarray | Tensor) -> None:
        """Set leaves[indices] = values, both [B]; values may lie on the device already."""
        values = on_device(values, self.leaves.device) if isinstance(values, np.ndarray) else values
        self.leaves[on_device(indices, self.leaves.device)] = values

    def find(self, fractions: Tensor) -> Tensor:
        """Return the leaves that these fractions in [0, 1) of the sum of all leaves fall into, [B] int64."""
        ends = self.leaves.cumsum(0)
        below_total = torch.nextafter(ends[-1], torch.zeros_like(ends[-1]))
        prefix_sums = torch.minimum(fractions * ends[-1], below_total)
        return torch.searchsorted(ends, prefix_sums, right=True).clamp_(max=len(ends) - 1)


Store = TypeVar("Store", bound=SumTree | CumulativeLeaves)


class StartLeaves(Generic[Store]):
    """The leaves of all starts: those of an actor's valid starts [low, high) are set, all others are zero."""

    def __init__(self, starts: WindowStarts, store: Store):
        self._starts = starts
        self.store: Store = store
        self.low = np.zeros(starts.layout.num_actors, np.int64)
        self.high = self.low.copy()

    def refresh(self, low: np.ndarray, high: np.ndarray, first_leaves: Callable[[np.ndarray, np.ndarray], Any]) -> bool:
        """Clear the leaves of starts that are lost and set those of new ones.

        Args:
            low: Number of each actor's oldest valid start.
            high: Number of each actor's newest valid start, plus 1.
            first_leaves: Returns the leaves of new starts (env_ids [K], step_ids [K]).

        Returns:
            True if a start was lost or is new.
        """
        changed = np.flatnonzero((low > self.low) | (high > self.high)).tolist()
        for actor in changed:
            lost = self._starts.ids_between(actor, self.low[actor], min(low[actor], self.high[actor]))
            self.store.set(self._starts.leaf_indices(*lost), np.zeros(len(lost.step_ids)))
            new = self._starts.ids_between(actor, max(self.high[actor], low[actor]), high[actor])
            if len(new.step_ids):
                self.store.set(self._starts.leaf_indices(*new), first_leaves(*new))
        self.low, self.high = low, high
        return bool(changed)


class PrioritizedLeaves(StartLeaves[Store]):
    """The leaves of all starts under a rule of priorities, and how many batches were drawn by them."""

    def __init__(self, starts: WindowStarts, store: Store, rule: PriorityRule[Any]):
        super().__init__(starts, store)
        self.rule, self.batches = rule, 0

    def statistics(self) -> dict[str, float]:
        """Return mean_priority, the mean leaf of all starts, max_priority, and the next batch's beta."""
        mean = float(self.store.total) / max(int((self.store.leaves > 0).sum()), 1)
        largest = float(self.rule.largest)
        return {"mean_priority": mean, "max_priority": largest, "beta": self.rule.beta(self.batches)}

    def state_dict(self, num_steps: int) -> dict[str, Any]:
        """Return the state; `num_steps` ring slots of each environment are in use."""
        leaves = torch.as_tensor(self.store.leaves).reshape(self._starts.shape)[:, : num_steps // self._starts.stride]
        priorities = {
            "leaves": leaves.cpu().clone(),
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "largest": float(self.rule.largest),
        }
        return {"batches": self.batches, "priorities": priorities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""
        stored, self.batches = state["priorities"], state["batches"]
        leaves = np.zeros(self._starts.shape)
        leaves[:, : stored["leaves"].shape[1]] = stored["leaves"].numpy()
        self.store.set(np.arange(leaves.size), leaves.ravel())
        self.low[:], self.high[:] = stored["low"], stored["high"]
        self.rule.largest[...] = stored["largest"]
