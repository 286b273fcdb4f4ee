"""Statistics of the episodes that an actor plays."""

import numpy as np

from core.types import TimeStep


class Tally:
    """Raw return and length of the episodes in progress, and of those that ended since they were last taken."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self.finished: list[dict[str, float]] = []

    def add(self, timestep: TimeStep) -> int:
        """Count a step of every stream. Returns the number of episodes it ended."""
        self._returns += timestep.raw_reward
        self._lengths += ~timestep.first
        ended = np.flatnonzero(timestep.last)
        for stream in ended:
            self.finished.append({"episodic_return": float(self._returns[stream]), "episodic_length": float(self._lengths[stream])})
        self._returns[ended] = 0
        self._lengths[ended] = 0
        return len(ended)

    def take(self) -> list[dict[str, float]]:
        finished, self.finished = self.finished, []
        return finished
