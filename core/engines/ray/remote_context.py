"""The context of an actor on a node without the shared memory: its parts use a connection to the trajectory server.

Everything travels with the chunks. The answer to each chunk carries the counters of the run and the newest
parameters, so an actor that plays needs no other call. At most `ray.chunks_in_flight` chunks are under way; then the
actor waits, as for a full queue.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray

from core.model import Model
from core.runtime.context import Context
from core.runtime.options import RunOptions
from core.runtime.parameter_store import fill
from core.runtime.run_state import RunCounters, RunState
from core.specs import EnvSpec, WindowSpec
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import Chunk, ChunkWriter, newest_chunk, single_actor_layout
from core.types import Window

POLL_PERIOD = 0.02  # seconds between two looks for answers
IDLE_TIMEOUT = 0.2  # seconds without an answer after which an actor that sends nothing asks for the status
ANSWER_TIMEOUT = 60.0  # seconds that an answer may take which needs no room in a ring

Records = list[tuple[dict[str, float], int]]  # values for the logger, each with its step


class RemoteRunInfo(NamedTuple):
    """The parts of a context that an actor on another node needs at its start."""

    options: RunOptions
    spec: EnvSpec
    roles: tuple[tuple[str, int], ...]
    layout: Layout  # of the ring to which the actor's steps go
    window: WindowSpec
    code: dict[str, str]  # path of each file of main's code -> its digest


class RunStatus(NamedTuple):
    """Counts, flags and parameters of the run, which come with every answer."""

    totals: dict[str, int]  # of the counts that an actor reads
    flags: list[int]
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
        self.on_status: Callable[[], None] = lambda: None  # called after each change of the status

    @property
    def unacknowledged(self) -> int:
        """Agent steps that the status does not contain yet."""
        return sum(steps for _, steps in self._in_flight)

    def has_room(self) -> bool:
        """Return True if another chunk may be sent."""
        self._collect(0.0)
        return len(self._in_flight) < self._max_in_flight

    def send(self, chunk: Chunk, steps: int) -> None:
        """Wait for room, then send a chunk with this number of agent steps.

        A server whose ring has no room answers late. If the server is gone, Ray raises an error.
        """
        while not self.has_room():
            self._collect(1.0)
        self._call(self._server.put, steps, chunk)

    def write(self, process_ind: int, values: Mapping[str, float], step: int) -> None:
        """Send values to the logger with the next call, as `LogRings.write` would."""
        self._records.append((dict(values), step))

    def poll(self) -> None:
        """Read answers, and ask for the status after an idle time. Must be called after every slice of work."""
        now = time.monotonic()
        if now - self._last_poll < POLL_PERIOD:
            return
        self._last_poll = now
        self._collect(0.0)
        if not self._in_flight and now - self._last_answer > IDLE_TIMEOUT:
            self._call(self._server.report)

    def close(self) -> None:
        """Send the remaining records, and wait at most 2 s for all answers."""
        self._call(self._server.report)
        references = [reference for reference, _ in self._in_flight]
        ray.wait(references, num_returns=len(references), timeout=2.0)

    def _call(self, method: Any, steps: int = 0, *chunk: Chunk) -> None:
        """Call a method of the server with the records so far."""
        records, self._records = self._records, []
        self._in_flight.append((method.remote(self._index, self._generation, *chunk, records), steps))

    def _collect(self, timeout: float) -> None:
        """Read the answers that are there, in order. Wait at most `timeout` seconds for the first."""
        while self._in_flight and ray.wait([self._in_flight[0][0]], timeout=timeout)[0]:
            self.status = ray.get(self._in_flight.popleft()[0])
            self._last_answer, timeout = time.monotonic(), 0.0
            self.on_status()


def remote_context(run_info: RemoteRunInfo, connection: ServerConnection) -> Context:
    """Return a context whose shared parts use this connection."""
    options, roles = run_info.options, run_info.roles
    counters, run_state = RunCounters(options.num_actors, 1), RemoteRunState(len(roles), connection)

    def follow() -> None:
        """Take over the newest status, and count the steps of this actor that it does not contain yet."""
        counters.set_totals(0, connection.status.totals)
        counters.count_agent_steps(0, connection.unacknowledged)
        run_state.set_flags(connection.status.flags)

    connection.on_status = follow
    follow()
    shared: dict[str, Any] = {
        "memories": dict.fromkeys(range(options.num_learners), RemoteMemory(run_info, connection)),
        "parameters": RemoteParameters(connection),
        "counters": counters,
        "run_state": run_state,
        "logs": connection,
    }
    return Context(options, run_info.spec, roles, **shared)


class RemoteMemory:
    """The part of a memory that an actor uses."""

    def __init__(self, run_info: RemoteRunInfo, connection: ServerConnection):
        self._run_info, self._connection = run_info, connection

    def writer(self, actor_ind: int, priorities: Callable[[Window], np.ndarray | None]) -> ChunkWriter:
        """Return the writer of this actor, which supplies initial priorities if the memory stores them."""
        return RemoteWriter(self._run_info, priorities, self._connection)


class RemoteWriter(ChunkWriter):
    """Fill chunks in a short ring of its own, and send each chunk when it is full."""

    def __init__(
        self, run_info: RemoteRunInfo, priorities: Callable[[Window], np.ndarray | None], connection: ServerConnection
    ):
        window = run_info.window
        trajectories = Trajectories(single_actor_layout(run_info.layout, window.length))
        super().__init__(trajectories, 0, window, priorities, connection.has_room)
        self._connection = connection

    def _publish(self, length: int) -> int:
        steps = super()._publish(length)
        self._connection.send(newest_chunk(self._trajectories, self._window.length), steps)
        return steps


class RemoteParameters:
    """The newest parameters of which the connection knows. A node fetches each version once, for all its actors."""

    def __init__(self, connection: ServerConnection):
        self._connection = connection

    @property
    def version(self) -> int:
        """The newest version; 0 if there is none."""
        return self._connection.status.version

    def pull(self, model: Model, known_version: int) -> int:
        """Bring the model up to date if its version is not the newest. Returns the version that the model now holds."""
        status = self._connection.status
        if status.version != known_version:
            fill(model, ray.get(status.parameters[0], timeout=ANSWER_TIMEOUT).copy())  # Ray's arrays are read-only
        return status.version


class RemoteRunState(RunState):
    """A run state of this process, whose flags follow the newest status and whose heartbeats are messages."""

    def __init__(self, num_processes: int, connection: ServerConnection):
        super().__init__(num_processes)
        self._connection = connection

    def heartbeat(self, process_ind: int) -> None:
        """Poll the connection, whose calls are the heartbeats."""
        self._connection.poll()
