"""Decide when a periodic task is due next."""

import time


class Schedule:
    """Be due every `steps` agent steps or, if `steps` is 0, every `period` seconds."""

    def __init__(self, period: float, steps: int, agent_steps: int):
        self._period, self._steps = period, steps
        self.start(agent_steps)

    def due(self, agent_steps: int) -> bool:
        return agent_steps >= self._next_steps if self._steps else time.monotonic() >= self._next_time

    def start(self, agent_steps: int) -> None:
        """Begin a new interval. With `steps`, it ends at their next multiple."""
        self._next_time = time.monotonic() + self._period
        self._next_steps = (agent_steps // self._steps + 1) * self._steps if self._steps else 0
