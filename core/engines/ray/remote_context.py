"""What stands in for the shared memory in an actor on another node than the learner's: its end of the line to the ingest.

Everything travels with the chunks: an answer to each says how the run's clock stands and which parameters are the newest, so an actor that
plays asks for nothing else. At most `chunks_in_flight` are on their way; then the actor waits, as it does for a full queue.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray

from core.engines.ray.connection import ANSWER_TIMEOUT, ServerConnection
from core.model import Model
from core.runtime.context import Context
from core.runtime.parameter_store import fill
from core.runtime.rate_limiter import RateLimiter
from core.runtime.run_counters import RunCounters
from core.runtime.run_state import RunState
from core.specs import EnvSpec, WindowSpec
from core.trajectory.chunk_codec import ChunkFormat, single_actor_layout
from core.trajectory.layout import Layout
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Window


class RemoteRunInfo(NamedTuple):
    """What an actor on another node must know beforehand."""

    options: Any
    spec: EnvSpec
    roles: tuple[tuple[str, int], ...]
    layout: Layout       # of rings like the one its rows go to
    window: WindowSpec
    code: dict[str, str]  # digest of each file of main's code


def remote_context(facts: RemoteRunInfo, link: ServerConnection) -> Context:
    """A context whose shared parts are this end of the line."""
    counters = RemoteCounters(link)
    shared: dict[str, Any] = {"memories": (RemoteMemory(facts, link),), "parameters": RemoteParameters(link), "counters": counters,
                              "rate_limiter": RateLimiter(facts.options.clock, counters), "run_state": RemoteRunState(link),
                              "logs": RemoteLogs(link)}
    return Context(facts.options, facts.spec, facts.roles, **shared)


class RemoteMemory:
    """An actor's side of the memory."""

    def __init__(self, facts: RemoteRunInfo, link: ServerConnection):
        self._facts, self._link = facts, link

    def writer(self, actor_ind: int, priorities: Callable[[Window], np.ndarray | None]) -> ChunkWriter:
        own = Trajectories(single_actor_layout(self._facts.layout, self._facts.window.length))
        with_priority = self._facts.options.memory_class.with_priority
        return RemoteWriter(own, 0, self._facts.window, priorities if with_priority else None, self._link)


class RemoteWriter(ChunkWriter):
    """Fills chunks in rows of its own and sends each away when it is full."""

    def __init__(self, own: Trajectories, actor_ind: int, window: WindowSpec,
                 priorities: Callable[[Window], np.ndarray | None] | None, link: ServerConnection):
        super().__init__(own, actor_ind, window, priorities, room=link.has_room)
        self._own, self._format, self._link = own, ChunkFormat(own.layout, window.length), link

    def _count(self, length: int) -> int:
        steps = super()._count(length)
        self._link.send(self._format.pack(self._own), steps)
        return steps


class RemoteParameters:
    """The newest version that the news told of; its values are fetched when they are wanted, once a node however many actors ask."""

    def __init__(self, link: ServerConnection):
        self._link = link

    @property
    def version(self) -> int:
        return self._link.news.version

    def pull(self, model: Model, known_version: int) -> int:
        news = self._link.news
        if news.version != known_version:
            fill(model, ray.get(news.parameters[0], timeout=ANSWER_TIMEOUT).copy())  # Ray's arrays cannot be written
        return news.version


class RemoteCounters(RunCounters):
    """The run's counters as the last answer had them, and this actor's own steps since."""

    def __init__(self, link: ServerConnection):
        self._link = link

    @property
    def agent_steps(self) -> int:
        return self._link.news.agent_steps + self._link.unacknowledged

    @property
    def inserted(self) -> int:
        return self._link.news.inserted + self._link.unacknowledged

    @property
    def sampled(self) -> int:
        return self._link.news.sampled

    def count_agent_steps(self, actor: int, agent_steps: int, episodes: int = 0) -> None:
        """Do nothing: the server counts what it stores."""


class RemoteRunState(RunState):
    """The stop flag as the last answer had it; heartbeats are messages."""

    def __init__(self, link: ServerConnection):
        self._link = link

    @property
    def stopped(self) -> bool:
        return self._link.news.stopped

    def heartbeat(self, process_ind: int) -> None:
        """Every message is a sign of life."""
        self._link.poll()

    def activity_marker(self, process_ind: int) -> np.ndarray:
        """Nobody reads it there."""
        return np.zeros(1)


class RemoteLogs:
    def __init__(self, link: ServerConnection):
        self._link = link

    def write(self, process_ind: int, values: Mapping[str, float], step: int) -> None:
        self._link.report(dict(values), step)
