"""Returns and lengths of the episodes that an actor plays."""

import numpy as np

from core.types import TimeStep


class EpisodeStatistics:
    """Add up the raw return and the length of each environment's episode."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._finished: list[dict[str, float]] = []

    def add(self, timestep: TimeStep) -> int:
        """Count a step of every environment. Return the number of episodes that it ended."""
        self._returns += timestep.raw_reward
        self._lengths += ~timestep.first
        ended = np.flatnonzero(timestep.last)
        self._finished += [
            {"episodic_return": float(self._returns[env]), "episodic_length": float(self._lengths[env])}
            for env in ended
        ]
        self._returns[ended] = 0
        self._lengths[ended] = 0
        return len(ended)

    def take(self) -> list[dict[str, float]]:
        """Return the statistics of the episodes that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished
