"""Gathering of windows by index, written once for the shared rings and for their copy on a learner's device."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from core.specs import WindowSpec
from core.trajectory.layout import Layout
from core.types import Window

Array = TypeVar("Array", np.ndarray, Tensor)


class WindowGatherer(ABC, Generic[Array]):
    """A reader of windows from rings whose fields are numpy arrays or tensors of one device, [num_slots, ...].

    The shared rings use numpy, because torch's operators cost more on arrays as small as a batch's indices: sampling
    through tensors ran at 0.71 to 0.98 of the speed (batches of 32 and 256 on one core). Shapes are fixed and Python
    reads no value, so that CUDA graphs can capture the gathering from tensors.
    """

    library: Any  # the module numpy or torch
    layout: Layout

    @abstractmethod
    def _array(self, values: np.ndarray) -> Array:
        """Return constants as an array of the library."""

    @abstractmethod
    def _tensor(self, array: Array) -> Tensor:
        """Return an array as a tensor that shares its memory."""

    @abstractmethod
    def _take(self, name: str, slots: Array) -> Array:
        """Return copies of a field's entries at flat indices."""

    @abstractmethod
    def take_frames(self, env_ids: Array, step_ids: Array, slots: Array) -> Array:
        """Return copies of the frames of steps, whose flat indices are `slots`, [*slots.shape, *frame]."""

    @abstractmethod
    def _clear(self, frames: Array, mask: Array) -> None:
        """Set the frames [P, B, S, *frame] to zero for which mask [P, B, S] is True."""

    @cached_property
    def _first_slots(self) -> Array:
        """Return the flat index of each environment's step 0, [total_envs] int64."""
        actors, envs = np.divmod(np.arange(self.layout.total_envs), self.layout.num_envs)
        return self._array(actors * self.layout.ring_length * self.layout.num_envs + envs)

    @cached_property
    def _ages(self) -> Array:
        """Return how many steps each frame of a stack is older than the newest one, [S] int64, oldest first."""
        return self._array(np.arange(self.layout.frame_stack - 1, -1, -1))

    @cached_property
    def _offsets(self) -> dict[WindowSpec, tuple[Array, Array]]:
        """Return the positions of steps, [T + 1, 1], and of observations, [P, 1], of the windows gathered so far."""
        return {}

    def slots(self, env_ids: Array, step_ids: Array) -> Array:
        """Return the flat indices of steps; env_ids and step_ids are broadcast together."""
        slots: Array = self._first_slots[env_ids] + step_ids % self.layout.ring_length * self.layout.num_envs
        return slots

    def gather(self, env_ids: Array, step_ids: Array, spec: WindowSpec) -> Window:
        """Return the windows that start at steps (env_ids [B], step_ids [B]), both int64."""
        if spec not in self._offsets:
            steps, observed = np.arange(spec.length + 1), np.array(spec.observations, np.int64)
            self._offsets[spec] = self._array(steps[:, None]), self._array(observed[:, None])
        offsets, positions = self._offsets[spec]
        slots = self.slots(env_ids, step_ids + offsets)  # [T + 1, B]
        lasts, library = self._take("last", slots), self.library
        if not spec.crosses_episodes:
            episode_end = library.amin(library.where(lasts, offsets, spec.length), 0)  # [B]
            positions = library.minimum(positions, episode_end)  # [P, B]
        observations = self._observations(env_ids, step_ids + positions)
        first, action, reward, discount = (
            self._tensor(self._take(name, slots)) for name in ("first", "action", "reward", "discount")
        )
        extras = {name: self._tensor(self._take(name, slots)) for name in self.layout.extras}
        return Window(
            self._tensor(observations),
            first,
            self._tensor(lasts),
            action,
            reward,
            discount,
            extras,
            self.states(slots[0]),
        )

    def states(self, slots: Array) -> tuple[Tensor, ...]:
        """Return the recurrent states, each [B, ...], stored with the chunks of steps at flat indices [B]."""
        if not self.layout.states:
            return ()
        num_envs = self.layout.num_envs
        chunks = slots // (num_envs * self.layout.chunk_length) * num_envs + slots % num_envs
        return tuple(self._tensor(self._take(name, chunks)) for name in self.layout.state_fields)

    def _observations(self, env_ids: Array, step_ids: Array) -> Array:
        """Return the observations of steps [P, B], with zeros for frames before the start of their episode."""
        if not self.layout.frame_stack:
            return self.take_frames(env_ids, step_ids, self.slots(env_ids, step_ids))
        env_ids, step_ids = env_ids[:, None], step_ids[..., None] - self._ages  # [B, 1] and [P, B, S]
        slots = self.slots(env_ids, step_ids)
        frames = self.take_frames(env_ids, step_ids, slots)
        ages_of_firsts = self.library.where(self._take("first", slots), self._ages, len(self._ages))
        self._clear(frames, self._ages > self.library.amin(ages_of_firsts, -1)[..., None])
        return frames
