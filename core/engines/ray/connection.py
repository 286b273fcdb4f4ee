"""The connection from a process on another node to its learner."""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import ray

GLANCE, IDLE = 0.02, 0.2  # seconds between looks for answers; without an answer, until an idle actor asks


ANSWER_TIMEOUT = 60.0     # seconds for what is answered at once


class News(NamedTuple):
    """How the run stands."""

    agent_steps: int
    inserted: int
    sampled: int
    stopped: bool
    version: int           # of `parameters`; 0: none yet
    parameters: list[Any]  # the reference of their values, in a list so that it is not fetched on the way


class ServerConnection:
    """`life` tells the ingest this actor from the one that was here before."""

    def __init__(self, ingest: Any, index: int, limit: int):
        self._ingest, self._index, self._limit = ingest, index, limit
        self._life, self.news = ray.get(ingest.hello.remote(index), timeout=ANSWER_TIMEOUT)
        self._in_flight: deque[tuple[Any, int]] = deque()  # what was asked, and the agent steps it brought
        self._records: list[tuple[dict[str, float], int]] = []
        self._looked = self._heard = time.monotonic()

    @property
    def unacknowledged(self) -> int:
        """Agent steps that are not in the news yet."""
        return sum(steps for _, steps in self._in_flight)

    def has_room(self) -> bool:
        self._collect(0.0)
        return len(self._in_flight) < self._limit

    def send(self, chunk: np.ndarray, steps: int) -> None:
        """Returns when the chunk is on its way. An ingest that waits for room answers late; of one that is gone Ray tells us."""
        while not self.has_room():
            self._collect(1.0)
        self._in_flight.append((self._ingest.put.remote(self._index, self._life, chunk, self._taken()), steps))

    def report(self, values: dict[str, float], step: int) -> None:
        self._records.append((values, step))

    def poll(self) -> None:
        """Called after every slice of work."""
        now = time.monotonic()
        if now - self._looked < GLANCE:
            return
        self._looked = now
        self._collect(0.0)
        if not self._in_flight and now - self._heard > IDLE:
            self._in_flight.append((self._ingest.listen.remote(self._index, self._life, self._taken()), 0))

    def close(self) -> None:
        """Wait a moment for what is on its way, and send what was reported since."""
        self._in_flight.append((self._ingest.listen.remote(self._index, self._life, self._taken()), 0))
        references = [reference for reference, _ in self._in_flight]
        ray.wait(references, num_returns=len(references), timeout=2.0)

    def _collect(self, timeout: float) -> None:
        """Read the answers that are there, in order; wait so long for the first."""
        while self._in_flight and ray.wait([self._in_flight[0][0]], timeout=timeout)[0]:
            self.news = ray.get(self._in_flight.popleft()[0])
            self._heard, timeout = time.monotonic(), 0.0

    def _taken(self) -> list[tuple[dict[str, float], int]]:
        records, self._records = self._records, []
        return records
