"""Uniform replay: every step that any actor stored is equally likely."""

from dataclasses import dataclass

import numpy as np
import torch

from core.memories.drawing import ATTEMPTS, check_batch_size, read_windows
from core.memory import Batch, Keys, Memory
from core.settings import setting


@dataclass(frozen=True)
class SharedParams:
    capacity: int = setting(100_000, low=1)  # agent steps


class SharedMemory(Memory):
    """Uniform over the legal starts of all actors."""

    Params = SharedParams

    def sample(self, batch_size: int) -> Batch | None:
        check_batch_size(batch_size)
        read = read_windows(self.trajectories, self.window, self._draw, batch_size)
        return None if read is None else Batch(*read, torch.ones(batch_size))

    def _draw(self, count: int) -> Keys | None:
        """Uniform starts; rows that end an episode are none and are drawn again."""
        keys = Keys(np.zeros(count, np.int64), np.zeros(count, np.int64))
        missing = np.ones(count, bool)
        lasts = self.trajectories.flat("last")
        for _ in range(ATTEMPTS):
            drawn = self._draw_rows(int(missing.sum()))
            if drawn is None:
                return None
            keys.streams[missing], keys.serials[missing] = drawn
            missing[missing] = lasts[self.trajectories.slots(*drawn)]
            if not missing.any():
                return keys
        return None

    def _draw_rows(self, count: int) -> Keys | None:
        low, high = self.trajectories.starts(self.window.length)
        ends = ((high - low) * self.layout.num_envs).cumsum()
        if not ends[-1]:
            return None
        ranks = self.generator.integers(ends[-1], size=count)
        actors = ends.searchsorted(ranks, side="right")
        from_end, envs = np.divmod(ends[actors] - 1 - ranks, self.layout.num_envs)
        return Keys(actors * self.layout.num_envs + envs, high[actors] - 1 - from_end)
