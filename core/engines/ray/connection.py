"""The connection of an actor on another node to the trajectory server."""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import ray

POLL_PERIOD = 0.02  # seconds between two looks for answers
IDLE_TIMEOUT = 0.2  # seconds without an answer after which an actor that sends nothing asks for the status
ANSWER_TIMEOUT = 60.0  # seconds that an answer may take which needs no room in a ring

Records = list[tuple[dict[str, float], int]]  # values for the logger, each with its step


class RunStatus(NamedTuple):
    """Counters and parameters of the run, which come with every answer."""

    agent_steps: int
    inserted: int
    sampled: int
    stopped: bool
    version: int  # of the parameters; 0 before the first
    parameters: list[Any]  # an ObjectRef, in a list so that Ray fetches the values only when they are wanted


class ServerConnection:
    """Send the chunks and records of one actor, and keep the newest `status`.

    At most `max_in_flight` calls are under way. The `generation` that the server gave this actor tells its calls from
    those of a predecessor.
    """

    def __init__(self, server: Any, index: int, max_in_flight: int):
        self._server, self._index, self._max_in_flight = server, index, max_in_flight
        self.status: RunStatus
        self._generation, self.status = ray.get(server.register.remote(index), timeout=ANSWER_TIMEOUT)
        self._in_flight: deque[tuple[Any, int]] = deque()  # reference of an answer, and the agent steps that were sent
        self._records: Records = []
        self._last_poll = self._last_answer = time.monotonic()

    @property
    def unacknowledged(self) -> int:
        """Agent steps that the status does not contain yet."""
        return sum(steps for _, steps in self._in_flight)

    def has_room(self) -> bool:
        """Return True if another chunk may be sent."""
        self._collect(0.0)
        return len(self._in_flight) < self._max_in_flight

    def send(self, chunk: np.ndarray, steps: int) -> None:
        """Wait for room, then send a chunk with this number of agent steps.

        A server whose ring has no room answers late. If the server is gone, Ray raises an error.
        """
        while not self.has_room():
            self._collect(1.0)
        answer = self._server.put.remote(self._index, self._generation, chunk, self._take_records())
        self._in_flight.append((answer, steps))

    def report(self, values: dict[str, float], step: int) -> None:
        """Send values to the logger with the next call."""
        self._records.append((values, step))

    def poll(self) -> None:
        """Read answers, and ask for the status after an idle time. Must be called after every slice of work."""
        now = time.monotonic()
        if now - self._last_poll < POLL_PERIOD:
            return
        self._last_poll = now
        self._collect(0.0)
        if not self._in_flight and now - self._last_answer > IDLE_TIMEOUT:
            self._request_status()

    def close(self) -> None:
        """Send the remaining records, and wait at most 2 s for all answers."""
        self._request_status()
        references = [reference for reference, _ in self._in_flight]
        ray.wait(references, num_returns=len(references), timeout=2.0)

    def _request_status(self) -> None:
        self._in_flight.append((self._server.report.remote(self._index, self._generation, self._take_records()), 0))

    def _collect(self, timeout: float) -> None:
        """Read the answers that are there, in order. Wait at most `timeout` seconds for the first."""
        while self._in_flight and ray.wait([self._in_flight[0][0]], timeout=timeout)[0]:
            self.status = ray.get(self._in_flight.popleft()[0])
            self._last_answer, timeout = time.monotonic(), 0.0

    def _take_records(self) -> Records:
        records, self._records = self._records, []
        return records
