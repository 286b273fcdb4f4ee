"""Prioritised replay (1511.05952), proportional variant: P(i) = p_i^alpha / sum_k p_k^alpha with p_i = |td_i| + epsilon.

Of the paper: stratified draws and importance weights w_i = (N P(i))^-beta / max_j w_j over the batch (section 3.4, algorithm 1),
beta annealed linearly. Deviation: a new step takes the priority its actor computed (Ape-X, 1803.00933); an actor that supplies none
leaves NaN in the row's `priority`, and the step starts at the largest priority seen, as in the paper. With a stride, steps are sequences.
"""

import math
from typing import Any

import numpy as np
import torch
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.device_replay import DevicePrioritizedReplay
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
    epsilon: float = Field(default=1e-6, gt=0, le=1e6)
    """Added to |td|, so that a step without error can still be drawn."""


class PrioritizedMemory(Memory):
    """The tree has one leaf a start: those of an actor's starts [low, high), as Starts numbers them, are set; all others are zero."""

    Params = PrioritizedParams
    Resident = DevicePrioritizedReplay
    with_priority = True

    def __init__(self, params: PrioritizedParams, layout: Layout, window: WindowSpec, seed: int):
        super().__init__(params, layout, window, seed)
        self._starts = WindowStarts(self.trajectories, window)
        self._tree: SumTree | None = None  # made where it is used, not sent to every process
        self._low = np.zeros(layout.num_actors, np.int64)
        self._high = np.zeros(layout.num_actors, np.int64)
        self._max_priority = 1.0
        self._batches = 0

    @property
    def tree(self) -> SumTree:
        if self._tree is None:
            self._tree = SumTree(math.prod(self._tree_shape))
        return self._tree

    @property
    def beta(self) -> float:
        """Exponent of the next batch's importance weights."""
        return self.beta_of(self._batches)

    def beta_of(self, batch: int) -> float:
        """Of the batch of this number, from 0."""
        start, end = self.params.beta_start, self.params.beta_end
        return start + (end - start) * min(batch / self.params.beta_updates, 1.0)

    # sampling ---------------------------------------------------------------------------------------------------------
    def sample(self, batch_size: int) -> Batch | None:
        check_batch_size(batch_size)
        self._ingest()  # once: rows of this batch keep their leaves even if a few of them are drawn again
        read = self._starts.read(self._draw, batch_size)
        if read is None:
            return None
        window, keys = read
        leaves = self.tree.leaves[self._places(keys)]
        weights = (leaves / leaves.min()) ** -self.beta  # N and the sum of all leaves cancel against the largest weight
        self._batches += self.batches_per_sample
        return Batch(window, keys, torch.from_numpy(weights.astype(np.float32)))

    def _draw(self, count: int) -> SampleIds | None:
        """One start from each of `count` equal shares of the total."""
        total = self.tree.total
        if not total:
            return None
        return self._keys(self.tree.find((np.arange(count) + self.generator.random(count)) / count * total))

    def _places(self, keys: SampleIds) -> np.ndarray:
        """Of these starts' leaves."""
        actors, envs = np.divmod(keys.streams, self.layout.num_envs)
        return np.ravel_multi_index((actors, keys.serials // self._starts.stride % self._starts.per_stream, envs), self._tree_shape)

    def _keys(self, places: np.ndarray) -> SampleIds:
        """The live starts whose leaves these are."""
        actors, numbers, envs = np.unravel_index(places, self._tree_shape)
        low = self._low[actors]
        serials = (low + (numbers - low) % self._starts.per_stream) * self._starts.stride
        return SampleIds(actors * self.layout.num_envs + envs, serials)

    def _ingest(self) -> None:
        """Bring the tree up to what actors wrote: leaves of lost rows are cleared, those of new starts set."""
        low, high = self._starts.numbers()
        for actor in np.flatnonzero((low > self._low) | (high > self._high)).tolist():
            lost = self._numbered(actor, self._low[actor], min(low[actor], self._high[actor]))
            self.tree.set(self._places(lost), np.zeros(len(lost.serials)))
            fresh = self._numbered(actor, max(self._high[actor], low[actor]), high[actor])
            self.tree.set(self._places(fresh), self._first_leaves(fresh))
        self._low, self._high = low, high

    def _numbered(self, actor: int, low: int, high: int) -> SampleIds:
        """Starts [low, high) of all streams of an actor."""
        numbers, envs = np.arange(low, max(high, low)), np.arange(self.layout.num_envs)
        streams = np.tile(actor * self.layout.num_envs + envs, len(numbers))
        return SampleIds(streams, np.repeat(numbers, len(envs)) * self._starts.stride)

    def _first_leaves(self, keys: SampleIds) -> np.ndarray:
        """Of fresh starts."""
        slots = self.trajectories.slots(*keys)
        priorities = self.trajectories.flat("priority")[slots].astype(np.float64)
        lasts = self.trajectories.flat("last")[slots]
        supplied = np.isfinite(priorities) & (priorities >= 0)
        self._max_priority = float(priorities.max(initial=self._max_priority, where=supplied))
        leaves = self._leaves(np.where(supplied, priorities, self._max_priority))
        return np.where(self._starts.barred(lasts), 0.0, leaves)

    def _leaves(self, priorities: np.ndarray) -> np.ndarray:
        return (priorities + self.params.epsilon) ** self.params.alpha

    # priorities -------------------------------------------------------------------------------------------------------
    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Raises ValueError for priorities that are not [B], finite and non-negative."""
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != keys.serials.shape:
            raise ValueError(f"priorities have shape {priorities.shape}, their keys {keys.serials.shape}")
        bad = ~(np.isfinite(priorities) & (priorities >= 0))
        if bad.any():
            raise ValueError(f"priorities must be finite and not negative, not {priorities[bad][0]} (position {bad.argmax()})")
        actors = keys.streams // self.layout.num_envs
        numbers = keys.serials // self._starts.stride
        live = (numbers >= self._low[actors]) & (numbers < self._high[actors])
        self._max_priority = float(priorities.max(initial=self._max_priority, where=live))
        self.tree.set(self._places(SampleIds(keys.streams[live], keys.serials[live])), self._leaves(priorities[live]))

    def statistics(self) -> dict[str, float]:
        """mean_priority: of p^alpha over all starts."""
        mean = self.tree.total / max(int(np.count_nonzero(self.tree.leaves)), 1)
        return {**super().statistics(), "mean_priority": mean, "max_priority": self._max_priority, "beta": self.beta}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        used = state["trajectories"]["last"].shape[1] // self._starts.stride
        leaves = torch.from_numpy(self.tree.leaves.reshape(self._tree_shape)[:, :used].copy())
        priorities = {"leaves": leaves, "low": self._low.tolist(), "high": self._high.tolist(), "largest": self._max_priority}
        return {**state, "batches": self._batches, "priorities": priorities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._batches = state["batches"]
        self._load_priorities(**state["priorities"])

    def continue_at(self, updates: int) -> None:
        self._batches = updates

    def _load_priorities(self, leaves: torch.Tensor, low: list[int], high: list[int], largest: float) -> None:
        stored = np.zeros(self._tree_shape)
        stored[:, :leaves.shape[1]] = leaves.numpy()
        self.tree.set(np.arange(stored.size), stored.ravel())
        self._low[:], self._high[:], self._max_priority = low, high, largest

    @property
    def _tree_shape(self) -> tuple[int, int, int]:
        return self.layout.num_actors, self._starts.per_stream, self.layout.num_envs
