"""IMPACT's circular buffer (1912.00167, section 3.3): N batches, each learnt from at most K times, visited in turn.

A batch that has been used K times makes room for a fresh one; while none is ready the others go on. Deviations: where all N are used up
and nothing is ready, sampling waits; with overflow=keep_latest actors may overwrite a batch, of which the rest is then used once more.
"""

from typing import Any

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.unrolls.queue import QueueParams, QueueRule
from core.memories.unrolls.strategy import NONE, DrawnUnrolls, Part, ReplayStrategy
from core.memories.unrolls.unroll_memory import UnrollMemory
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds


@frozen_dataclass
class CircularParams(QueueParams):
    """capacity and overflow are those of the queue that feeds it."""

    num_batches: int = Field(default=4, ge=1, le=10_000)
    """Batches that the memory holds (N of IMPACT: 4 to 16)."""
    times: int = Field(default=2, ge=1, le=10_000)
    """Times that each unroll is learnt from (K of IMPACT: 2)."""


class CircularRule(ReplayStrategy):
    Params = CircularParams

    def __init__(self, params: Any, memory: Any):
        super().__init__(params, memory)
        self._queue = QueueRule(params, memory)
        self._gathered: SampleIds = NONE                                 # of the next fresh batch
        self._batches: list[SampleIds | None] = [None] * params.num_batches
        self._uses = np.zeros(params.num_batches, np.int64)         # that are left
        self._next = 0

    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        return QueueRule.ring_unrolls(params, batch_size, num_actors) + 2 * params.num_batches * batch_size * num_actors

    @classmethod
    def is_rate_limited(cls, params: Any) -> bool:
        return True

    @classmethod
    def times(cls, params: Any) -> int:
        return params.times

    @classmethod
    def problems(cls, params: Any, share: int) -> list[str]:
        if params.overflow in ("block", "keep_latest"):
            return []
        return [f"overflow={params.overflow} does not suit a circular memory, whose batches stay in the rings: block or keep_latest do"]

    @property
    def store(self) -> Trajectories:
        return self.memory.trajectories

    def room(self) -> bool:
        return self._queue.room()

    def skipped(self, count: int) -> None:
        self._queue.skipped(count)

    def insert(self, keys: SampleIds) -> None:
        self._queue.insert(keys)

    def draw(self, count: int) -> DrawnUnrolls | None:
        """A whole batch; part of one only to make up for unrolls that were overwritten."""
        for _ in range(self.params.num_batches):
            number, self._next = self._next, (self._next + 1) % self.params.num_batches
            fresh = not self._uses[number] and self._refill(number, count)
            if self._uses[number]:
                return self._use(number, count, fresh)
        return None

    def lost(self, count: int) -> None:
        self._queue.lost(count)

    def _refill(self, number: int, count: int) -> bool:
        missing = count - len(self._gathered.streams)
        drawn = self._queue.draw(missing) if missing > 0 else None
        if drawn is not None:
            self._gathered = SampleIds(*(np.concatenate(pair) for pair in zip(self._gathered, drawn.keys)))
        if len(self._gathered.streams) < count:
            return False
        self._batches[number], self._gathered, self._uses[number] = self._gathered, NONE, self.params.times
        return True

    def _use(self, number: int, count: int, fresh: bool) -> DrawnUnrolls:
        """A batch that its writers have reached is used for the last time."""
        keys = self._batches[number]
        assert keys is not None
        self._uses[number] = self._uses[number] - 1 if self.memory.trajectories.still_valid(*keys).all() else 0
        return DrawnUnrolls(SampleIds(keys.streams[:count], keys.serials[:count]), np.full(min(len(keys.streams), count), fresh))

    def statistics(self) -> dict[str, float]:
        return {**self._queue.statistics(), "circular_uses_left": float(self._uses.sum())}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        batches = [None if keys is None else [*map(np.ndarray.tolist, keys)] for keys in self._batches]
        return {"queue": self._queue.state_dict(), "gathered": [*map(np.ndarray.tolist, self._gathered)], "batches": batches,
                "uses": self._uses.tolist(), "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._queue.load_state_dict(state["queue"])
        self._gathered, self._next, self._uses[:] = _keys(state["gathered"]), state["next"], state["uses"]
        self._batches = [None if stored is None else _keys(stored) for stored in state["batches"]]


class CircularMemory(UnrollMemory):
    Params = CircularParams

    @classmethod
    def parts(cls, params: Any) -> list[Part]:
        return [Part(CircularRule, params, 1.0)]


def _keys(stored: list[list[int]]) -> SampleIds:
    return SampleIds(*(np.array(column, np.int64) for column in stored))
