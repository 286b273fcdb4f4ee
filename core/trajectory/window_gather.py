"""Gathering of windows by index, written once for the shared rings and for their copy on a learner's device."""

from abc import ABC, abstractmethod
from functools import cache, cached_property

import torch
from torch import Tensor

from core.specs import WindowSpec
from core.trajectory.layout import Layout
from core.types import Window


class WindowGatherer(ABC):
    """A reader of windows from rings whose fields lie on one device, flattened to [num_slots, ...].

    Indices are computed by tensor operations of fixed shapes, and Python reads no value of a tensor, so that CUDA
    graphs can capture the gathering.
    """

    layout: Layout
    device: torch.device

    @abstractmethod
    def _take(self, name: str, slots: Tensor) -> Tensor:
        """Return copies of a field's entries at flat indices."""

    @abstractmethod
    def _take_frames(self, env_ids: Tensor, step_ids: Tensor, slots: Tensor) -> Tensor:
        """Return copies of the frames of steps, whose flat indices are `slots`, [*slots.shape, *frame]."""

    def _clear(self, frames: Tensor, mask: Tensor) -> None:
        """Set the frames [P, B, S, *frame] to zero for which mask [P, B, S] is True."""
        frames.masked_fill_(mask.view(*mask.shape, *[1] * (frames.dim() - mask.dim())), 0)

    @cached_property
    def _first_slots(self) -> Tensor:
        """Return the flat index of each environment's step 0, [total_envs] int64."""
        env_ids, num_envs = torch.arange(self.layout.total_envs, device=self.device), self.layout.num_envs
        return env_ids // num_envs * (num_envs * self.layout.ring_length) + env_ids % num_envs

    @cached_property
    def _ages(self) -> Tensor:
        """Return how many steps each frame of a stack is older than the newest one, [S] int64, oldest first."""
        return torch.arange(self.layout.frame_stack - 1, -1, -1, device=self.device)

    def _slots(self, env_ids: Tensor, step_ids: Tensor) -> Tensor:
        """Return the flat indices of steps; env_ids and step_ids are broadcast together."""
        return self._first_slots.take(env_ids) + step_ids % self.layout.ring_length * self.layout.num_envs

    def _gather(self, env_ids: Tensor, step_ids: Tensor, spec: WindowSpec) -> Window:
        """Return the windows that start at steps (env_ids [B], step_ids [B]), both int64."""
        offsets, positions = _offsets(spec, self.device)
        slots = self._slots(env_ids, step_ids + offsets)  # [T + 1, B]
        lasts = self._take("last", slots)
        if not spec.crosses_episodes:
            positions = torch.minimum(positions, torch.where(lasts, offsets, spec.length).amin(0))  # [P, B]
        observations = self._observations(env_ids, step_ids + positions)
        extras = {name: self._take(name, slots) for name in self.layout.extras}
        return Window(observations, self._take("first", slots), lasts, self._take("action", slots),
                      self._take("reward", slots), self._take("discount", slots), extras, self._states(slots[0]))

    def _states(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Return the recurrent states, each [B, ...], stored with the chunks of steps at flat indices [B]."""
        if not self.layout.states:
            return ()
        num_envs = self.layout.num_envs
        chunks = slots // (num_envs * self.layout.chunk_length) * num_envs + slots % num_envs
        return tuple(self._take(name, chunks) for name in self.layout.state_fields)

    def _observations(self, env_ids: Tensor, step_ids: Tensor) -> Tensor:
        """Return the observations of steps [P, B], with zeros for frames before the start of their episode."""
        if not self.layout.frame_stack:
            return self._take_frames(env_ids, step_ids, self._slots(env_ids, step_ids))
        env_ids, step_ids = env_ids[:, None], step_ids[..., None] - self._ages  # [B, 1] and [P, B, S]
        slots = self._slots(env_ids, step_ids)
        frames = self._take_frames(env_ids, step_ids, slots)
        age_of_first = torch.where(self._take("first", slots), self._ages, len(self._ages)).amin(-1, keepdim=True)
        self._clear(frames, self._ages > age_of_first)
        return frames


@cache
def _offsets(spec: WindowSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of a window's steps, [T + 1, 1], and of its observations, [P, 1], on the device."""
    steps, observations = range(spec.length + 1), spec.observations
    return (torch.tensor(steps, dtype=torch.int64, device=device)[:, None],
            torch.tensor(observations, dtype=torch.int64, device=device)[:, None])
