"""Proportional prioritised replay (1511.05952), on the CPU with a sum tree or on the learner's device.

A start i is drawn with probability P(i) = p_i^alpha / sum_k p_k^alpha, where p_i = |td_i| + epsilon. The number
p_i^alpha is called its leaf.

- Draws are stratified: one from each of B equal parts of the sum of all leaves.
- Importance weights are w_i = (N P(i))^-beta / max_j w_j over the batch (section 3.4, algorithm 1). N and the sum of
  all leaves cancel against the largest weight. beta is annealed linearly.
- Deviation: a new start takes the priority that its actor computed (Ape-X, 1803.00933). An actor that supplies none
  leaves NaN, and the start takes the largest priority seen, as in the paper.
- With a stride, a start is that of a sequence instead of a step.
"""

import math
from functools import cached_property
from typing import Any, Generic

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device, upload
from core.learning.optimizer import ScheduledTensor
from core.memories.sum_tree import CumulativeLeaves, SumTree
from core.memories.uniform import DeviceReplay, StartLeaves, Store, UniformParams, WindowStarts
from core.memory import Memory
from core.specs import WindowSpec
from core.trajectory.ring_buffer import Array, Layout
from core.types import Batch, SampleIds


class PriorityRule(Generic[Array]):
    """The arithmetic of priorities, draws and weights, on numpy arrays or on tensors of one device.

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
        """Update `largest` by priorities [B] and return their leaves. An invalid priority counts as `largest`."""
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


class PrioritizedLeaves(StartLeaves[Store]):
    """The leaves of all starts under a rule of priorities, and how many batches were drawn by them."""

    def __init__(self, starts: WindowStarts, store: Store, rule: PriorityRule[Any]):
        super().__init__(starts, store)
        self.rule, self.batches = rule, 0

    def statistics(self) -> dict[str, float]:
        """Return mean_priority, the mean of all priorities to the power alpha, the largest |td|, and the next beta."""
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
        self.store.fill(leaves.ravel())
        self.low[:], self.high[:] = stored["low"], stored["high"]
        self.rule.largest[...] = stored["largest"]


class DevicePrioritizedReplay(DeviceReplay):
    """Prioritised replay on the learner's device."""

    _start_leaves: PrioritizedLeaves[CumulativeLeaves]

    def __init__(self, memory: Memory, device: torch.device):
        super().__init__(memory, device)
        self.rule = PriorityRule(memory.params, torch.ones((), dtype=torch.float64, device=device))
        self._start_leaves = PrioritizedLeaves(self._starts, self._start_leaves.store, self.rule)
        self._beta = ScheduledTensor(self.rule.beta, device, torch.float64)

    def plan(self, count: int) -> None:
        """Compute beta of the next `count` batches."""
        self._beta.plan(self._start_leaves.batches, count)
        self._start_leaves.batches += count

    def _first_leaves(self, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        shared = self.memory.trajectories
        priorities = shared.flat("priority")[shared.slots(env_ids, step_ids)].astype(np.float64)
        return self.rule.first_leaves(on_device(priorities, self.device), self._invalid_starts(env_ids, step_ids))

    def _draw_fractions(self, count: int) -> Tensor:
        return self.rule.fractions(super()._draw_fractions(count))

    def _weights(self, leaf_indices: Tensor) -> Tensor:
        return self.rule.weights(self._leaves[leaf_indices], self._beta.take()).to(torch.float32)

    def update_priorities(self, leaf_indices: Tensor, priorities: Tensor) -> None:
        """Set |td| priorities [B]. Where a priority is not finite or negative, the leaf stays as it is."""
        priorities = priorities.to(torch.float64)
        leaves = torch.where(self.rule.is_valid(priorities), self.rule.leaves(priorities), self._leaves[leaf_indices])
        self._leaves[leaf_indices] = leaves

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), **self._start_leaves.statistics()}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, **self._start_leaves.state_dict(num_steps=state["trajectories"]["last"].shape[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._start_leaves.load_state_dict(state)
        upload(self._start_leaves.low, self._low)

    def continue_at(self, updates: int) -> None:
        self._start_leaves.batches = updates


@frozen_dataclass
class PrioritizedParams(UniformParams):
    alpha: float = Field(default=0.6, ge=0, le=10)
    """Exponent of the priorities; 0 draws uniformly (Ape-X: 0.6, Rainbow: 0.5)."""
    beta_start: float = Field(default=0.4, ge=0, le=1)
    """Exponent of the importance weights at first."""
    beta_end: float = Field(default=1.0, ge=0, le=1)
    """Exponent of the importance weights at last."""
    beta_updates: int = Field(default=1_000_000, ge=1, le=10**12)
    """Batches over which beta goes from beta_start to beta_end."""
    priority_epsilon: float = Field(default=1e-6, gt=0, le=1e6)
    """Added to |td|, so that a step without error can still be drawn."""


class PrioritizedMemory(Memory):
    """Prioritised replay of windows."""

    Params = PrioritizedParams
    device_class = DevicePrioritizedReplay
    with_priority = True

    @classmethod
    def own_bytes(cls, params: PrioritizedParams, layout: Layout, window: WindowSpec) -> int:
        return SumTree.nbytes(layout.num_slots // (window.stride or 1))

    def __init__(self, params: PrioritizedParams, layout: Layout, window: WindowSpec, seed: int):
        super().__init__(params, layout, window, seed)
        self._starts = WindowStarts(self.trajectories, window)

    @cached_property
    def _start_leaves(self) -> PrioritizedLeaves[SumTree]:
        """Return the leaves, made on first use, because they are not sent to every process."""
        tree = SumTree(math.prod(self._starts.shape))
        return PrioritizedLeaves(self._starts, tree, PriorityRule(self.params, np.ones(())))

    @property
    def tree(self) -> SumTree:
        """Return the sum tree over the leaves of all starts."""
        return self._start_leaves.store

    def sample(self, batch_size: int) -> Batch | None:
        # once: steps of this batch keep their leaves even if some of them are drawn again
        self._start_leaves.refresh(*self._starts.valid_range(), self._first_leaves)
        drawn = self._starts.read(self._draw, batch_size)
        if drawn is None:
            return None
        (window, ids), rule = drawn, self._start_leaves.rule
        leaves = self.tree.leaves[self._starts.leaf_indices(*ids)].reshape(-1, self.batches_per_sample)
        weights = rule.weights(leaves, rule.beta(self._start_leaves.batches)).astype(np.float32)
        self._start_leaves.batches += self.batches_per_sample
        return Batch(window, ids, torch.from_numpy(weights.reshape(-1)))

    def _draw(self, count: int) -> SampleIds | None:
        total = self.tree.total
        if not total:
            return None
        leaf_indices = self.tree.find(self._start_leaves.rule.fractions(self.generator.random(count)) * total)
        return SampleIds(*self._starts.ids(leaf_indices, self._start_leaves.low))

    def _first_leaves(self, env_ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        slots = self.trajectories.slots(env_ids, step_ids)
        priorities = self.trajectories.flat("priority")[slots].astype(np.float64)
        invalid_starts = self._starts.invalid_starts(self.trajectories.flat("last")[slots])
        leaves: np.ndarray = self._start_leaves.rule.first_leaves(priorities, invalid_starts)
        return leaves

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Set the |td| priorities [B] of starts; starts overwritten since are dropped.

        Raises ValueError for priorities that are not [B], finite and non-negative.
        """
        priorities, rule = np.asarray(priorities, np.float64), self._start_leaves.rule
        if priorities.shape != keys.step_ids.shape:
            raise ValueError(f"priorities have shape {priorities.shape}, their keys {keys.step_ids.shape}")
        invalid = ~rule.is_valid(priorities)
        if invalid.any():
            raise ValueError(
                f"priorities must be finite and not negative, not {priorities[invalid][0]} "
                f"(position {invalid.argmax()})"
            )
        actors, numbers = keys.env_ids // self.layout.num_envs, keys.step_ids // self._starts.stride
        live = (numbers >= self._start_leaves.low[actors]) & (numbers < self._start_leaves.high[actors])
        if live.any():
            leaf_indices = self._starts.leaf_indices(keys.env_ids[live], keys.step_ids[live])
            self.tree.set(leaf_indices, rule.leaves(priorities[live]))

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), **self._start_leaves.statistics()}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, **self._start_leaves.state_dict(num_steps=state["trajectories"]["last"].shape[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._start_leaves.load_state_dict(state)

    def continue_at(self, updates: int) -> None:
        self._start_leaves.batches = updates
