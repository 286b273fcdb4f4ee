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
class SharedParams(MemoryParams):
    capacity: int = Field(default=100_000, ge=1, le=10**10)
    """Agent steps that the memory holds."""


class SharedMemory(Memory):
    """Uniform over the legal starts of all actors."""

    Params = SharedParams
    Resident = DeviceReplay

    def __init__(self, params: SharedParams, layout: Layout, window: WindowSpec, seed: int):
        super().__init__(params, layout, window, seed)
        self._starts = WindowStarts(self.trajectories, window)

    def sample(self, batch_size: int) -> Batch | None:
        check_batch_size(batch_size)
        read = self._starts.read(self._draw, batch_size)
        return None if read is None else Batch(*read, torch.ones(batch_size))

    def _draw(self, count: int) -> SampleIds | None:
        """Uniform starts; rows that are none are drawn again."""
        keys = SampleIds(np.zeros(count, np.int64), np.zeros(count, np.int64))
        missing = np.ones(count, bool)
        lasts = self.trajectories.flat("last")
        for _ in range(ATTEMPTS):
            drawn = self._draw_rows(int(missing.sum()))
            if drawn is None:
                return None
            keys.streams[missing], keys.serials[missing] = drawn
            missing[missing] = self._starts.barred(lasts[self.trajectories.slots(*drawn)])
            if not missing.any():
                return keys
        return None

    def _draw_rows(self, count: int) -> SampleIds | None:
        low, high = self._starts.numbers()
        ends = ((high - low) * self.layout.num_envs).cumsum()
        if not ends[-1]:
            return None
        ranks = self.generator.integers(ends[-1], size=count)
        actors = ends.searchsorted(ranks, side="right")
        from_end, envs = np.divmod(ends[actors] - 1 - ranks, self.layout.num_envs)
        return SampleIds(actors * self.layout.num_envs + envs, (high[actors] - 1 - from_end) * self._starts.stride)
