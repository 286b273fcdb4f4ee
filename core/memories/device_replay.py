"""Replay on the learner's device: rows, priorities and draws.

Sampling and writing priorities back are tensor operations of fixed shapes in which python looks at no value, so that whole updates can be
captured; only `refresh`, between updates, knows of actors. Every start has a leaf, a float64: 0 where no window starts. A draw is a
running sum over all leaves and a search in it: two kernels, where a tree would take one for each of its levels. Between two `refresh` no
row changes, so a priority that is written back within its update never meets another row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.shared_arrays import total_bytes
from core.device.transfers import upload
from core.learning.device_schedule import ScheduledTensor
from core.memories.window_starts import WindowStarts, check_batch_size
from core.memory import DeviceMemory, Memory
from core.specs import ArraySpec, WindowSpec
from core.trajectory.device_ring_buffer import DeviceRingBuffer
from core.trajectory.layout import Layout
from core.types import Batch, SampleIds


class DeviceReplay(DeviceMemory):
    """Uniform: the leaf of every start is 1. Draws come from a generator of the device, made of the memory's seed."""

    def __init__(self, memory: Memory, device: torch.device):
        self.memory, self.device, self.layout, self.window = memory, device, memory.layout, memory.window
        self.mirror, self._starts = DeviceRingBuffer(memory.trajectories, device), WindowStarts(memory.trajectories, memory.window)
        self.generator = torch.Generator(device).manual_seed(memory.seed)
        actors = self.layout.num_actors
        self._leaves = torch.zeros(actors, self._starts.per_stream, self.layout.num_envs, dtype=torch.float64, device=device)
        self._low, self._high = np.zeros(actors, np.int64), np.zeros(actors, np.int64)  # of the starts whose leaves are set
        self._first_numbers = torch.zeros(actors, dtype=torch.int64, device=device)    # `_low` on the device

    @staticmethod
    def nbytes(layout: Layout, window: WindowSpec) -> int:
        """That an instance allocates on its device, the running sums of a draw included."""
        starts = ArraySpec((layout.num_streams * (layout.rows // (window.stride or 1)),), "float64")
        return total_bytes(DeviceRingBuffer.arrays(layout)) + 2 * starts.nbytes

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        return (self.generator,)

    # between updates --------------------------------------------------------------------------------------------------
    def refresh(self) -> bool:
        low, high = (-(-rows // self._starts.stride) for rows in self.mirror.refresh(self.window.length))
        changed = np.flatnonzero((low > self._low) | (high > self._high)).tolist()
        for actor in changed:
            self._leaves[actor, self._places(self._low[actor], min(low[actor], self._high[actor]))] = 0.0
            first, last = max(self._high[actor], low[actor]), high[actor]
            if first < last:
                self._leaves[actor, self._places(first, last)] = self._first_leaves(actor, first, last)
        self._low, self._high = low, high
        if changed:
            upload(low, self._first_numbers)
        return bool((high - low).max() > (not self.window.stride))  # of two rows in a row one is no end of an episode

    def plan(self, count: int) -> None:
        """Nothing changes from update to update."""

    def _places(self, first: int, last: int) -> Tensor:
        """In the ring, of starts [first, last): [K] int64."""
        return torch.arange(first, max(last, first), device=self.device) % self._starts.per_stream

    def _first_leaves(self, actor: int, first: int, last: int) -> Tensor:
        """Of fresh starts [first, last) of all streams, [K, num_envs]."""
        return self._legal(actor, first, last).to(torch.float64)

    def _legal(self, actor: int, first: int, last: int) -> Tensor:
        """[K, num_envs] bool: which of them are starts."""
        lasts = self.mirror["last"][actor, self._places(first, last) * self._starts.stride]
        return torch.ones_like(lasts) if self.window.stride else ~lasts

    # updates ----------------------------------------------------------------------------------------------------------
    def sample(self, batch_size: int) -> tuple[Batch, Tensor]:
        check_batch_size(batch_size)
        ends = self._leaves.flatten().cumsum(0)
        below = torch.minimum(self._shares(batch_size) * ends[-1], torch.nextafter(ends[-1], torch.zeros_like(ends[-1])))
        places = torch.searchsorted(ends, below, right=True).clamp_(max=len(ends) - 1)
        streams, serials = self._keys(places)
        window = self.mirror.gather(streams, serials, self.window)
        return Batch(window, SampleIds(streams, serials), self._weights(places)), places  # type: ignore[arg-type]

    def _shares(self, count: int) -> Tensor:
        """Where in the running sum, each in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=self.device)

    def _keys(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Streams and serial numbers of the live starts whose leaves these are."""
        size, num_envs = self._starts.per_stream, self.layout.num_envs
        numbers, envs, actors = places // num_envs % size, places % num_envs, places // (num_envs * size)
        low = self._first_numbers[actors]
        return actors * num_envs + envs, (low + (numbers - low) % size) * self._starts.stride

    def _weights(self, places: Tensor) -> Tensor:
        return torch.ones(len(places), device=self.device)

    def update_priorities(self, places: Tensor, priorities: Tensor) -> None:
        """All starts stay equally likely."""

    # reports and checkpoints ------------------------------------------------------------------------------------------
    def statistics(self) -> dict[str, float]:
        return Memory.statistics(self.memory)

    def state_dict(self) -> dict[str, Any]:
        """As the memory's own, so that either continues from the other's; and this one's generator."""
        return {**Memory.state_dict(self.memory), "device_generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rows are copied to the device by the next `refresh`. A generator of another kind of device starts anew."""
        Memory.load_state_dict(self.memory, state)
        mine = self.generator.get_state()
        if "device_generator" in state and state["device_generator"].shape == mine.shape:
            self.generator.set_state(state["device_generator"])
        self.mirror.copied[:] = self._low[:] = self._high[:] = 0
        self._leaves.zero_()


class DevicePrioritizedReplay(DeviceReplay):
    """The rule of core/memories/prioritized.py: the leaf of a start is (|td| + epsilon) ^ alpha."""

    def __init__(self, memory: Any, device: torch.device):
        super().__init__(memory, device)
        self.params = memory.params
        self._largest = torch.ones((), dtype=torch.float64, device=device)
        self._batches = 0
        self._beta = ScheduledTensor(memory.beta_of, device, torch.float64)

    def plan(self, count: int) -> None:
        self._beta.plan(self._batches, count)
        self._batches += count

    def _first_leaves(self, actor: int, first: int, last: int) -> Tensor:
        """Those that their actors computed; the largest seen where one computed none."""
        legal = self._legal(actor, first, last)
        priorities = torch.empty(legal.shape, device=self.device)
        rows = np.arange(first, last) % self._starts.per_stream * self._starts.stride
        upload(self.memory.trajectories.arrays["priority"][actor, rows], priorities)
        leaves = self._see(priorities.to(torch.float64), self._largest)
        return torch.where(legal, leaves, 0.0)

    def _see(self, priorities: Tensor, otherwise: Tensor) -> Tensor:
        """Leaves of these priorities, float64; of those that are not finite or negative the leaf of `otherwise`."""
        sound = torch.isfinite(priorities) & (priorities >= 0)
        self._largest.copy_(torch.maximum(self._largest, torch.where(sound, priorities, 0.0).amax()))
        return (torch.where(sound, priorities, otherwise) + self.params.epsilon) ** self.params.alpha

    def _shares(self, count: int) -> Tensor:
        """One in each of `count` equal parts."""
        return (torch.arange(count, device=self.device) + super()._shares(count)) / count

    def _weights(self, places: Tensor) -> Tensor:
        leaves = self._leaves.flatten()[places]
        return ((leaves / leaves.amin()) ** -self._beta.take()).to(torch.float32)

    def update_priorities(self, places: Tensor, priorities: Tensor) -> None:
        """Leaves of priorities that are not finite, or negative, stay as they are."""
        flat, priorities = self._leaves.view(-1), priorities.to(torch.float64)
        sound = torch.isfinite(priorities) & (priorities >= 0)
        flat[places] = torch.where(sound, self._see(priorities, self._largest), flat[places])

    def statistics(self) -> dict[str, float]:
        total, count = self._leaves.sum(), (self._leaves > 0).sum().clamp(min=1)
        return {**super().statistics(), "mean_priority": float(total / count), "max_priority": float(self._largest),
                "beta": self.memory.beta_of(self._batches)}  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        used = state["trajectories"]["last"].shape[1] // self._starts.stride
        priorities = {"leaves": self._leaves[:, :used].cpu().clone(), "low": self._low.tolist(), "high": self._high.tolist(),
                      "largest": float(self._largest)}
        return {**state, "batches": self._batches, "priorities": priorities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        stored, self._batches = state["priorities"], state["batches"]
        self._leaves[:, :stored["leaves"].shape[1]] = stored["leaves"].to(self.device)
        self._low[:], self._high[:] = stored["low"], stored["high"]
        upload(self._low, self._first_numbers)
        self._largest.fill_(stored["largest"])

    def continue_at(self, updates: int) -> None:
        self._batches = updates
