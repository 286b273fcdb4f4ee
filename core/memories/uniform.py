"""Uniform replay: every step that any actor stored is equally likely, or every sequence on a stride.

The module also has what both rules of replay need, uniform and prioritised (core/memories/prioritized.py): the steps at
which windows may start, the reading of windows while actors write, and replay on the learner's device.

On a device, sampling and the writing of priorities are tensor operations of fixed shapes. Python reads no value of
them, so whole updates can be captured. Only `refresh`, between updates, looks at what actors wrote. Between two calls
of `refresh` no step changes. A priority that is written back within its update therefore always meets the step that it
was computed from.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.common.shared_arrays import total_bytes
from core.device.torch_runtime import upload
from core.memories.sum_tree import CumulativeLeaves, SumTree
from core.memory import DeviceMemory, Memory, MemoryParams
from core.specs import ArraySpec, WindowSpec
from core.trajectory.device_ring_buffer import DeviceRingBuffer
from core.trajectory.ring_buffer import Array, Layout, Trajectories
from core.types import Batch, SampleIds, Window

# Draws after which a memory that changes faster than it can be read, or that has no start at all, counts as not ready.
ATTEMPTS = 100


class WindowStarts:
    """The possible starts of windows, numbered in each environment: start k is step k * stride.

    The stride is 1, or with WindowSpec.stride the length of a chunk. Windows of stride 1 do not start at a `last` step,
    where no action was taken. Windows on a longer stride do, because most of their steps are others.

    Methods that compute indices accept numpy arrays and tensors of any device alike.
    """

    def __init__(self, trajectories: Trajectories, spec: WindowSpec):
        self._trajectories, self._spec = trajectories, spec
        self.stride, self.layout = spec.stride or 1, trajectories.layout
        self.per_env = self.layout.ring_length // self.stride  # starts in the ring of an environment

    def valid_range(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts [low, high) of each actor from which a whole window can be read, both [num_actors]."""
        return self.numbers_from(*self._trajectories.starts(self._spec.length))

    def numbers_from(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers [low, high) of the starts among steps [low, high)."""
        return -(-low // self.stride), -(-high // self.stride)

    def invalid_starts(self, lasts: Array) -> Array:
        """Return which steps are no starts, [B] bool; `lasts` [B] bool tells which steps end an episode."""
        invalid: Array = lasts & (not self._spec.stride)
        return invalid

    # leaves: one number for each start that the rings can hold --------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the leaves, which are stored flat: (actors, starts of an environment, environments)."""
        return self.layout.num_actors, self.per_env, self.layout.num_envs

    def leaf_indices(self, env_ids: Array, step_ids: Array) -> Array:
        """Return the positions [B] of starts among the leaves."""
        num_envs = self.layout.num_envs
        rings = env_ids // num_envs * self.per_env + step_ids // self.stride % self.per_env
        indices: Array = rings * num_envs + env_ids % num_envs
        return indices

    def ids(self, leaf_indices: Array, low: Array) -> tuple[Array, Array]:
        """Return environment and step ids, both [B], of the valid starts at these positions.

        Args:
            leaf_indices: Positions among the leaves, [B].
            low: Number of each actor's oldest valid start, [num_actors].
        """
        rings, envs = leaf_indices // self.layout.num_envs, leaf_indices % self.layout.num_envs
        actors = rings // self.per_env
        oldest = low[actors]
        step_ids = (oldest + (rings % self.per_env - oldest) % self.per_env) * self.stride
        return actors * self.layout.num_envs + envs, step_ids

    def ids_between(self, actor: int, first: int, last: int) -> SampleIds:
        """Return the starts [first, last) of all environments of an actor."""
        numbers, envs = np.arange(first, last), np.arange(self.layout.num_envs)
        env_ids = np.tile(actor * self.layout.num_envs + envs, len(numbers))
        return SampleIds(env_ids, np.repeat(numbers, len(envs)) * self.stride)

    # reading ----------------------------------------------------------------------------------------------------------
    def read(self, draw: Callable[[int], SampleIds | None], batch_size: int) -> tuple[Window, SampleIds] | None:
        """Read windows whose starts `draw(count)` chooses.

        Windows that their writer reached during the reading are drawn again. Returns None if `draw` finds no start.
        """
        ids = draw(batch_size)
        for _ in range(ATTEMPTS):
            if ids is None:
                return None
            window = self._trajectories.gather(*ids, self._spec)
            lost = ~self._trajectories.still_valid(*ids) | self.invalid_starts(window.lasts[0].numpy())
            if not lost.any():
                return window, ids
            if (fresh := draw(int(lost.sum()))) is None:
                return None
            ids = SampleIds(ids.env_ids.copy(), ids.step_ids.copy())
            ids.env_ids[lost], ids.step_ids[lost] = fresh
        return None


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


class DeviceReplay(DeviceMemory):
    """Uniform replay: the leaf of every start is 1.

    Draws come from a generator of the device that is made with the memory's seed.
    """

    def __init__(self, memory: Memory, device: torch.device):
        self.memory, self.device, self.window = memory, device, memory.window
        self.ring = DeviceRingBuffer(memory.trajectories, device)
        self._starts = WindowStarts(memory.trajectories, memory.window)
        self.generator = torch.Generator(device).manual_seed(memory.seed)
        self._start_leaves = StartLeaves(self._starts, CumulativeLeaves(math.prod(self._starts.shape), device))
        self._leaves = self._start_leaves.store.leaves
        # _start_leaves.low on the device
        self._low = torch.zeros(memory.layout.num_actors, dtype=torch.int64, device=device)

    @staticmethod
    def nbytes(layout: Layout, window: WindowSpec) -> int:
        """Return the bytes that an instance allocates on its device, the running sums of a draw included."""
        starts = ArraySpec((layout.total_envs * (layout.ring_length // (window.stride or 1)),), "float64")
        return total_bytes(DeviceRingBuffer.arrays(layout)) + 2 * starts.nbytes

    # between updates --------------------------------------------------------------------------------------------------
    def refresh(self) -> bool:
        low, high = self._starts.numbers_from(*self.ring.refresh(self.window.length))
        if self._start_leaves.refresh(low, high, self._first_leaves):
            upload(low, self._low)
        min_starts = 1 if self.window.stride else 2  # of two adjacent steps, one does not end an episode
        return bool((high - low).max() >= min_starts)

    def _first_leaves(self, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        """Return the leaves of new starts [K]."""
        return (~self._invalid_starts(env_ids, step_ids)).to(torch.float64)

    def _invalid_starts(self, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        """Return which of these steps are no starts, [K] bool, by the copy: the shared rings may have changed since."""
        return self._starts.invalid_starts(self.ring.take("last", env_ids, step_ids))

    # updates ----------------------------------------------------------------------------------------------------------
    def sample(self, batch_size: int) -> tuple[Batch, Tensor]:
        leaf_indices = self._start_leaves.store.find(self._draw_fractions(batch_size))
        env_ids, step_ids = self._starts.ids(leaf_indices, self._low)
        window = self.ring.gather(env_ids, step_ids, self.window)
        keys = SampleIds(env_ids, step_ids)  # type: ignore[arg-type]
        return Batch(window, keys, self._weights(leaf_indices)), leaf_indices

    def _draw_fractions(self, count: int) -> Tensor:
        """Draw fractions of the sum of all leaves, [count] in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=self.device)

    def _weights(self, leaf_indices: Tensor) -> Tensor:
        return torch.ones(len(leaf_indices), device=self.device)

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
        self.ring.copied[:] = self._start_leaves.low[:] = self._start_leaves.high[:] = 0
        self._leaves.zero_()


@frozen_dataclass
class UniformParams(MemoryParams):
    capacity: int = Field(default=100_000, ge=1, le=10**10)
    """Agent steps that the memory holds."""


class UniformMemory(Memory):
    """Uniform replay over the valid starts of all actors."""

    Params = UniformParams
    device_class = DeviceReplay

    def __init__(self, params: UniformParams, layout: Layout, window: WindowSpec, seed: int):
        super().__init__(params, layout, window, seed)
        self._starts = WindowStarts(self.trajectories, window)

    def sample(self, batch_size: int) -> Batch | None:
        drawn = self._starts.read(self._draw, batch_size)
        return None if drawn is None else Batch(*drawn, torch.ones(batch_size))

    def _draw(self, count: int) -> SampleIds | None:
        """Draw uniform starts; steps that are no starts are drawn again."""
        keys = SampleIds(np.zeros(count, np.int64), np.zeros(count, np.int64))
        missing, lasts = np.ones(count, bool), self.trajectories.flat("last")
        (low, high), num_envs = self._starts.valid_range(), self.layout.num_envs
        ends = ((high - low) * num_envs).cumsum()
        for _ in range(ATTEMPTS if ends[-1] else 0):
            ranks = self.generator.integers(ends[-1], size=int(missing.sum()))
            actors = ends.searchsorted(ranks, side="right")
            from_end, envs = np.divmod(ends[actors] - 1 - ranks, num_envs)
            drawn = SampleIds(actors * num_envs + envs, (high[actors] - 1 - from_end) * self._starts.stride)
            keys.env_ids[missing], keys.step_ids[missing] = drawn
            missing[missing] = self._starts.invalid_starts(lasts[self.trajectories.slots(*drawn)])
            if not missing.any():
                return keys
        return None
