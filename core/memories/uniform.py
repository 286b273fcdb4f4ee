"""Uniform replay: every step that any actor stored is equally likely, or every sequence on a stride."""

import numpy as np
import torch
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.device_replay import DeviceReplay
from core.memories.window_starts import ATTEMPTS, WindowStarts, check_batch_size
from core.memory import Memory, MemoryParams
from core.specs import WindowSpec
from core.trajectory.layout import Layout
from core.types import Batch, SampleIds


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
        check_batch_size(batch_size)
        drawn = self._starts.read(self._draw, batch_size)
        return None if drawn is None else Batch(*drawn, torch.ones(batch_size))

    def _draw(self, count: int) -> SampleIds | None:
        """Draw uniform starts; steps that are no starts are drawn again."""
        keys = SampleIds(np.zeros(count, np.int64), np.zeros(count, np.int64))
        missing = np.ones(count, bool)
        lasts = self.trajectories.flat("last")
        for _ in range(ATTEMPTS):
            drawn = self._draw_steps(int(missing.sum()))
            if drawn is None:
                return None
            keys.env_ids[missing], keys.step_ids[missing] = drawn
            missing[missing] = self._starts.invalid_starts(lasts[self.trajectories.slots(*drawn)])
            if not missing.any():
                return keys
        return None

    def _draw_steps(self, count: int) -> SampleIds | None:
        low, high = self._starts.valid_range()
        ends = ((high - low) * self.layout.num_envs).cumsum()
        if not ends[-1]:
            return None
        ranks = self.generator.integers(ends[-1], size=count)
        actors = ends.searchsorted(ranks, side="right")
        from_end, envs = np.divmod(ends[actors] - 1 - ranks, self.layout.num_envs)
        step_ids = (high[actors] - 1 - from_end) * self._starts.stride
        return SampleIds(actors * self.layout.num_envs + envs, step_ids)
