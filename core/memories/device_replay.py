"""Replay on the learner's device: steps, priorities and draws.

Sampling and the writing of priorities are tensor operations of fixed shapes in which Python reads no value, so that
whole updates can be captured. Only `refresh`, between updates, looks at what actors wrote. Between two calls of
`refresh` no step changes. A priority that is written back within its update therefore always meets the step that it was
computed from.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.shared_arrays import total_bytes
from core.device.transfers import on_device, upload
from core.learning.schedules import ScheduledTensor
from core.memories.priority_rule import CumulativeLeaves, PrioritizedLeaves, PriorityRule, StartLeaves
from core.memories.window_starts import WindowStarts, check_batch_size
from core.memory import DeviceMemory, Memory
from core.specs import ArraySpec, WindowSpec
from core.trajectory.device_ring_buffer import DeviceRingBuffer
from core.trajectory.layout import Layout
from core.types import Batch, SampleIds


class DeviceReplay(DeviceMemory):
    """Uniform replay: the leaf of every start is 1.

    Draws come from a generator of the device that is made with the memory's seed.
    """

    def __init__(self, memory: Memory, device: torch.device):
        self.memory, self.device, self.window = memory, device, memory.window
        self.ring = DeviceRingBuffer(memory.trajectories, device)
        self._starts = WindowStarts(memory.trajectories, memory.window)
        self.generator = torch.Generator(device).manual_seed(memory.seed)
        self._table = StartLeaves(self._starts, CumulativeLeaves(math.prod(self._starts.shape), device))
        self._leaves = self._table.store.leaves
        self._low = torch.zeros(memory.layout.num_actors, dtype=torch.int64, device=device)  # _table.low on the device

    @staticmethod
    def nbytes(layout: Layout, window: WindowSpec) -> int:
        """Return the bytes that an instance allocates on its device, the running sums of a draw included."""
        starts = ArraySpec((layout.total_envs * (layout.ring_length // (window.stride or 1)),), "float64")
        return total_bytes(DeviceRingBuffer.arrays(layout)) + 2 * starts.nbytes

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        return (self.generator,)

    # between updates --------------------------------------------------------------------------------------------------
    def refresh(self) -> bool:
        low, high = self._starts.numbers_from(*self.ring.refresh(self.window.length))
        if self._table.refresh(low, high, self._first_leaves):
            upload(low, self._low)
        return bool((high - low).max() > (not self.window.stride))  # of two adjacent steps, one does not end an episode

    def plan(self, count: int) -> None:
        """Do nothing: uniform draws follow no schedule."""

    def _first_leaves(self, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        """Return the leaves of new starts [K]."""
        return (~self._invalid_starts(env_ids, step_ids)).to(torch.float64)

    def _invalid_starts(self, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        """Return which of these steps are no starts, [K] bool, by the copy: the shared rings may have changed since."""
        return self._starts.invalid_starts(self.ring.take("last", env_ids, step_ids))

    # updates ----------------------------------------------------------------------------------------------------------
    def sample(self, batch_size: int) -> tuple[Batch, Tensor]:
        check_batch_size(batch_size)
        leaf_indices = self._table.store.find(self._shares(batch_size))
        env_ids, step_ids = self._starts.ids(leaf_indices, self._low)
        window = self.ring.gather(env_ids, step_ids, self.window)
        keys = SampleIds(env_ids, step_ids)  # type: ignore[arg-type]
        return Batch(window, keys, self._weights(leaf_indices)), leaf_indices

    def _shares(self, count: int) -> Tensor:
        """Draw fractions of the sum of all leaves, [count] in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=self.device)

    def _weights(self, leaf_indices: Tensor) -> Tensor:
        return torch.ones(len(leaf_indices), device=self.device)

    def update_priorities(self, leaf_indices: Tensor, priorities: Tensor) -> None:
        """Do nothing: all starts stay equally likely."""

    # reports and checkpoints ------------------------------------------------------------------------------------------
    def statistics(self) -> dict[str, float]:
        return Memory.statistics(self.memory)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory's own state, from which either side continues, and the state of this generator."""
        return {**Memory.state_dict(self.memory), "device_generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this class or of the memory.

        The next `refresh` copies the steps to the device. The state of another kind of device's generator is ignored.
        """
        Memory.load_state_dict(self.memory, state)
        present = self.generator.get_state()
        if "device_generator" in state and state["device_generator"].shape == present.shape:
            self.generator.set_state(state["device_generator"])
        self.ring.copied[:] = self._table.low[:] = self._table.high[:] = 0
        self._leaves.zero_()


class DevicePrioritizedReplay(DeviceReplay):
    """Prioritised replay under the rule of core/memories/priority_rule.py."""

    _table: PrioritizedLeaves[CumulativeLeaves]

    def __init__(self, memory: Memory, device: torch.device):
        super().__init__(memory, device)
        self.rule = PriorityRule(memory.params, torch.ones((), dtype=torch.float64, device=device))
        self._table = PrioritizedLeaves(self._starts, self._table.store, self.rule)
        self._beta = ScheduledTensor(self.rule.beta, device, torch.float64)

    def plan(self, count: int) -> None:
        """Compute beta of the next `count` batches."""
        self._beta.plan(self._table.batches, count)
        self._table.batches += count

    def _first_leaves(self, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        shared = self.memory.trajectories
        priorities = shared.flat("priority")[shared.slots(env_ids, step_ids)].astype(np.float64)
        return self.rule.first_leaves(on_device(priorities, self.device), self._invalid_starts(env_ids, step_ids))

    def _shares(self, count: int) -> Tensor:
        return self.rule.fractions(super()._shares(count))

    def _weights(self, leaf_indices: Tensor) -> Tensor:
        return self.rule.weights(self._leaves[leaf_indices], self._beta.take()).to(torch.float32)

    def update_priorities(self, leaf_indices: Tensor, priorities: Tensor) -> None:
        """Set |td| priorities [B]. Where a priority is not finite or negative, the leaf stays as it is."""
        priorities = priorities.to(torch.float64)
        leaves = torch.where(self.rule.is_valid(priorities), self.rule.leaves(priorities), self._leaves[leaf_indices])
        self._leaves[leaf_indices] = leaves

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), **self._table.statistics()}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, **self._table.state_dict(num_steps=state["trajectories"]["last"].shape[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._table.load_state_dict(state)
        upload(self._table.low, self._low)

    def continue_at(self, updates: int) -> None:
        self._table.batches = updates
