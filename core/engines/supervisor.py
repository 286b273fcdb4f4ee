"""Parts of the supervision of a run's processes: limits, a record of each process, threads for each learner."""

import os
import time
from typing import Any


def learner_threads(options: Any) -> int:
    """Intra-op threads of a learner; other processes have one. Learners share what is left of the cores, or all of up to four."""
    cores = len(os.sched_getaffinity(0))
    left = cores if cores <= 4 else max(cores - options.num_actors - 1, cores // 2)
    return options.learner.threads or max(left // options.num_learners, 1)


class Place:
    """One process of the run's table and what is known of its successive lives."""

    def __init__(self, role: str, index: int, threads: int):
        self.role, self.index, self.threads = role, index, threads
        self.process: Any = None
        self.failure: Any = None
        self.restarts, self.started, self.ended = 0, 0.0, False
        self.mark: str | None = None          # of what its environment starts
        self.attempts = 0                     # to start it that failed in a row
        self.next_attempt: float | None = None
        self.failed_at_start = False  # in its first life, by an error of its own
        self._deaths: list[float] = []  # when, within the last window

    def __str__(self) -> str:
        return f"{self.role} {self.index}"

    def count_death(self, window: float) -> None:
        """Note a death now. `restarts` then counts those of the last `window` seconds."""
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < window] + [now]
        self.restarts = len(self._deaths) - 1
