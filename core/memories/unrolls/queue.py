"""First in, first out: every unroll is learnt from once, or dropped by the overflow policy and counted.

block: actors wait while the queue is full, nothing is dropped. keep_latest drops the oldest waiting unroll, keep_oldest the one that
arrives, alternating now the one and now the other. What the learner has begun to gather for a batch waits no longer, so a capacity
below the batch is no deadlock. While the first `learn_start` rows are stored nobody reads, and block keeps the latest.
"""

from collections import deque
from typing import Any, Literal

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.unrolls.strategy import DrawnUnrolls, Part, ReplayStrategy
from core.memories.unrolls.unroll_memory import UnrollMemory
from core.memories.unrolls.unroll_slots import UnrollStore
from core.memory import MemoryParams
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds

COPIED = ("keep_oldest", "alternating")  # what they keep may be older than what the rings hold


@frozen_dataclass
class QueueParams(MemoryParams):
    capacity: int = Field(default=1, ge=1, le=10**7)
    """Unrolls that may wait; overflow "block" rounds it up to whole chunks of every actor."""
    overflow: Literal["block", "keep_latest", "keep_oldest", "alternating"] = "block"
    """Rule for what happens when the queue is full."""


class QueueRule(ReplayStrategy):
    """`_waiting` holds keys of the store in the order of their arrival. A key of a copy has its slot for a stream."""

    Params = QueueParams
    packs = False  # a batch must always fit

    def __init__(self, params: Any, memory: Any):
        super().__init__(params, memory)
        self._waiting: deque[tuple[int, int]] = deque()
        copied = params.overflow in COPIED
        self._copies = UnrollStore(memory.trajectories, params.capacity, memory.window.length, self.packs) if copied else None
        self._free, self._given = list(range(self.slots(params))), list[int]()  # slots: empty; drawn and not read yet
        self._arrived = self._dropped = self._turn = 0

    # what it asks for -------------------------------------------------------------------------------------------------
    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        return (params.capacity + 2 * batch_size) * num_actors

    @classmethod
    def slots(cls, params: Any) -> int:
        return params.capacity if params.overflow in COPIED else 0

    @classmethod
    def is_rate_limited(cls, params: Any) -> bool:
        return True

    @classmethod
    def problems(cls, params: Any, share: int) -> list[str]:
        if params.overflow not in COPIED or params.capacity >= share:
            return []
        return [f"a queue with overflow={params.overflow} must hold a batch's share of it: capacity={params.capacity} is below {share}"]

    # what it does -----------------------------------------------------------------------------------------------------
    @property
    def store(self) -> Trajectories:
        return self._copies.store if self._copies else super().store

    def room(self) -> bool:
        return self.params.overflow != "block" or self.memory.unread() < self.params.capacity

    def skipped(self, count: int) -> None:
        self._arrived += count
        self._drop(count)

    def insert(self, keys: SampleIds) -> None:
        self._arrived += len(keys.streams)
        if self._copies:
            for stream, serial in zip(*keys):
                self._copy(self._copies, SampleIds(stream[None], serial[None]))
            return
        self._waiting.extend(zip(*map(np.ndarray.tolist, keys)))
        begun = self.memory.layout.num_streams if self.params.overflow == "block" else 0  # chunks that actors may finish
        while len(self._waiting) > self.params.capacity + begun:
            self._drop_oldest()

    def draw(self, count: int) -> DrawnUnrolls | None:
        """All at once from copies, which wait in their slots as long as that; otherwise what is there, up to count."""
        if len(self._waiting) < (count if self._copies else 1):
            return None
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._leave(len(taken))
        if self._copies:
            self._given += [slot for slot, _ in taken]
        return DrawnUnrolls(SampleIds(*np.array(taken, np.int64).T), np.ones(len(taken), bool))

    def lost(self, count: int) -> None:
        self._dropped += count

    def release(self) -> None:
        self._free, self._given = self._free + self._given, []

    def statistics(self) -> dict[str, float]:
        return {"queue_size": float(len(self._waiting)), "queue_arrived": float(self._arrived), "queue_dropped": float(self._dropped)}

    def _copy(self, copies: UnrollStore, key: SampleIds) -> None:
        """Of the unroll that arrives, if it is not the one that is dropped."""
        if not self._free and self._waiting and self._oldest_goes():
            self._free.append(self._drop_oldest())
        if self._free and copies.put(np.array(self._free[-1:]), key).all():
            streams, serials = copies.keys(np.array([self._free.pop()]))
            self._waiting.append((int(streams[0]), int(serials[0])))
        else:
            self._drop(1)

    def _oldest_goes(self) -> bool:
        self._turn += self.params.overflow == "alternating"
        return self._turn % 2 == 1

    def _drop_oldest(self) -> int:
        """Returns its stream."""
        self._drop(1)
        return self._waiting.popleft()[0]

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._leave(count)

    def _leave(self, count: int) -> None:
        self.memory.shared["taken"][0] += count

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"counts": [self._arrived, self._dropped, self._turn], "waiting": [list(pair) for pair in self._waiting], "free": self._free,
                "given": self._given, **({"copies": self._copies.state_dict()} if self._copies else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._arrived, self._dropped, self._turn = state["counts"]
        self._waiting = deque((first, second) for first, second in state["waiting"])
        self._free, self._given = list(state["free"]), list(state["given"])
        if self._copies:
            self._copies.load_state_dict(state["copies"])


class QueueMemory(UnrollMemory):
    """Nothing but a queue: on-policy learning as in IMPALA."""

    Params = QueueParams

    @classmethod
    def parts(cls, params: Any) -> list[Part]:
        return [Part(QueueRule, params, 1.0)]
