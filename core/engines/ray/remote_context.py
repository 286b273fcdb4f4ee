"""The context of an actor on a node without the shared memory: its parts use a connection to the trajectory server.

Everything travels with the chunks. The answer to each chunk carries the counters of the run and the newest
parameters, so an actor that plays needs no other call. At most `ray.chunks_in_flight` chunks are under way; then the
actor waits, as for a full queue.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray

from core.engines.ray.connection import ANSWER_TIMEOUT, ServerConnection
from core.model import Model
from core.runtime.context import Context
from core.runtime.options import RunOptions
from core.runtime.run_state import RateLimiter, RunCounters, RunState, fill
from core.specs import EnvSpec, WindowSpec
from core.trajectory.chunk_codec import ChunkFormat, single_actor_layout
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Window


class RemoteRunInfo(NamedTuple):
    """The parts of a context that an actor on another node needs at its start."""

    options: RunOptions
    spec: EnvSpec
    roles: tuple[tuple[str, int], ...]
    layout: Layout  # of the ring to which the actor's steps go
    window: WindowSpec
    code: dict[str, str]  # path of each file of main's code -> its digest


def remote_context(run_info: RemoteRunInfo, connection: ServerConnection) -> Context:
    """Return a context whose shared parts use this connection."""
    counters = RemoteCounters(connection)
    shared: dict[str, Any] = {
        "memories": dict.fromkeys(range(run_info.options.num_learners), RemoteMemory(run_info, connection)),
        "parameters": RemoteParameters(connection),
        "counters": counters,
        "rate_limiter": RateLimiter(run_info.options.rate_limiter, counters),
        "run_state": RemoteRunState(connection),
        "logs": RemoteLogs(connection),
    }
    return Context(run_info.options, run_info.spec, run_info.roles, **shared)


class RemoteMemory:
    """The part of a memory that an actor uses."""

    def __init__(self, run_info: RemoteRunInfo, connection: ServerConnection):
        self._run_info, self._connection = run_info, connection

    def writer(self, actor_ind: int, priorities: Callable[[Window], np.ndarray | None]) -> ChunkWriter:
        """Return the writer of this actor, which supplies initial priorities if the memory stores them."""
        layout, window = self._run_info.layout, self._run_info.window
        with_priority = self._run_info.options.memory_class.with_priority
        return RemoteWriter(
            Trajectories(single_actor_layout(layout, window.length)),
            window,
            priorities if with_priority else None,
            self._connection,
        )


class RemoteWriter(ChunkWriter):
    """Fill chunks in a short ring of its own, and send each chunk when it is full."""

    def __init__(
        self,
        trajectories: Trajectories,
        window: WindowSpec,
        priorities: Callable[[Window], np.ndarray | None] | None,
        connection: ServerConnection,
    ):
        super().__init__(trajectories, 0, window, priorities, room=connection.has_room)
        self._format, self._connection = ChunkFormat(trajectories.layout, window.length), connection

    def _count(self, length: int) -> int:
        steps = super()._count(length)
        self._connection.send(self._format.pack(self._trajectories), steps)
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


class RemoteCounters(RunCounters):
    """The counters of the newest status, plus the steps of this actor that the status does not contain yet."""

    def __init__(self, connection: ServerConnection):
        self._connection = connection

    @property
    def agent_steps(self) -> int:
        return self._connection.status.agent_steps + self._connection.unacknowledged

    @property
    def inserted(self) -> int:
        return self._connection.status.inserted + self._connection.unacknowledged

    @property
    def sampled(self) -> int:
        return self._connection.status.sampled

    def count_agent_steps(self, actor: int, agent_steps: int, episodes: int = 0) -> None:
        """Do nothing: the trajectory server counts what it stores."""


class RemoteRunState(RunState):
    """The stop flag of the newest status; heartbeats are messages."""

    def __init__(self, connection: ServerConnection):
        self._connection = connection

    @property
    def stopped(self) -> bool:
        return self._connection.status.stopped

    def heartbeat(self, process_ind: int) -> None:
        """Poll the connection, whose calls are the heartbeats."""
        self._connection.poll()

    def activity_marker(self, process_ind: int) -> np.ndarray:
        """Return a marker that nobody reads."""
        return np.zeros(1)


class RemoteLogs:
    """Send values for the logger by the connection."""

    def __init__(self, connection: ServerConnection):
        self._connection = connection

    def write(self, process_ind: int, values: Mapping[str, float], step: int) -> None:
        """Send values with the step at which they were measured."""
        self._connection.report(dict(values), step)
