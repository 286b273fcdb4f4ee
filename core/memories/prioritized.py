"""Prioritised replay on the CPU: a sum tree under the rule of core/memories/priority_rule.py."""

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.device_replay import DevicePrioritizedReplay
from core.memories.priority_rule import PrioritizedLeaves, PriorityRule
from core.memories.sum_tree import SumTree
from core.memories.window_starts import WindowStarts, check_batch_size
from core.memory import Memory, MemoryParams
from core.specs import WindowSpec
from core.trajectory.layout import Layout
from core.types import Batch, SampleIds


@frozen_dataclass
class PrioritizedParams(MemoryParams):
    capacity: int = Field(default=100_000, ge=1, le=10**10)
    """Agent steps that the memory holds."""
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

    def __init__(self, params: PrioritizedParams, layout: Layout, window: WindowSpec, seed: int):
        super().__init__(params, layout, window, seed)
        self._starts = WindowStarts(self.trajectories, window)

    @cached_property
    def rule(self) -> PriorityRule[np.ndarray]:
        """Return the arithmetic of priorities, which the learner's process makes: what Ray sends is read-only."""
        return PriorityRule(self.params, np.ones(()))

    @cached_property
    def _leaves(self) -> PrioritizedLeaves[SumTree]:
        """Return the leaves, made on first use so that they are not sent to every process."""
        return PrioritizedLeaves(self._starts, SumTree(math.prod(self._starts.shape)), self.rule)

    @property
    def tree(self) -> SumTree:
        """Return the sum tree over the leaves of all starts."""
        return self._leaves.store

    @property
    def beta(self) -> float:
        """Return the exponent of the next batch's importance weights."""
        return self.rule.beta(self._leaves.batches)

    def sample(self, batch_size: int) -> Batch | None:
        check_batch_size(batch_size)
        # once: steps of this batch keep their leaves even if some of them are drawn again
        self._leaves.refresh(*self._starts.valid_range(), self._first_leaves)
        drawn = self._starts.read(self._draw, batch_size)
        if drawn is None:
            return None
        window, ids = drawn
        leaves = self.tree.leaves[self._starts.leaf_indices(*ids)].reshape(-1, self.batches_per_sample)
        weights = self.rule.weights(leaves, self.beta).astype(np.float32)
        self._leaves.batches += self.batches_per_sample
        return Batch(window, ids, torch.from_numpy(weights.reshape(-1)))

    def _draw(self, count: int) -> SampleIds | None:
        total = self.tree.total
        if not total:
            return None
        leaf_indices = self.tree.find(self.rule.fractions(self.generator.random(count)) * total)
        return SampleIds(*self._starts.ids(leaf_indices, self._leaves.low))

    def _first_leaves(self, env_ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        slots = self.trajectories.slots(env_ids, step_ids)
        priorities = self.trajectories.flat("priority")[slots].astype(np.float64)
        return self.rule.first_leaves(priorities, self._starts.invalid_starts(self.trajectories.flat("last")[slots]))

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Set the |td| priorities [B] of starts; starts overwritten since are dropped.

        Raises ValueError for priorities that are not [B], finite and non-negative.
        """
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != keys.step_ids.shape:
            raise ValueError(f"priorities have shape {priorities.shape}, their keys {keys.step_ids.shape}")
        invalid = ~self.rule.is_valid(priorities)
        if invalid.any():
            raise ValueError(
                f"priorities must be finite and not negative, not {priorities[invalid][0]} "
                f"(position {invalid.argmax()})"
            )
        actors, numbers = keys.env_ids // self.layout.num_envs, keys.step_ids // self._starts.stride
        live = (numbers >= self._leaves.low[actors]) & (numbers < self._leaves.high[actors])
        if live.any():
            leaf_indices = self._starts.leaf_indices(keys.env_ids[live], keys.step_ids[live])
            self.tree.set(leaf_indices, self.rule.leaves(priorities[live]))

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), **self._leaves.statistics()}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, **self._leaves.state_dict(num_steps=state["trajectories"]["last"].shape[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._leaves.load_state_dict(state)

    def continue_at(self, updates: int) -> None:
        self._leaves.batches = updates
