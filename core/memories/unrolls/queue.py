"""A queue of unrolls: each is learnt from once, first in first out, or dropped by the overflow policy and counted.

- block: actors wait while the queue is full, and nothing is dropped once `min_replay_size` steps are stored.
- keep_latest drops the oldest waiting unroll, keep_oldest the arriving one, and alternating takes turns between them.
- An unroll that was drawn for the next batch does not wait any more. A capacity below the batch is therefore no
  deadlock.
- Before that nothing is drawn and no actor waits: block then drops the oldest beyond the capacity.
"""

from collections import deque
from typing import Any, Literal

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.unrolls.unroll_memory import DrawnUnrolls, MixtureComponent, ReplayStrategy, UnrollMemory
from core.memories.unrolls.unroll_slots import UnrollStore
from core.memory import MemoryParams
from core.types import SampleIds

COPIED = ("keep_oldest", "alternating")  # policies that may keep unrolls longer than the rings do


@frozen_dataclass
class QueueParams(MemoryParams):
    capacity: int = Field(default=1, ge=1, le=10**7)
    """Unrolls that may wait; on_full "block" rounds it up to whole chunks of every actor."""
    on_full: Literal["block", "keep_latest", "keep_oldest", "alternating"] = "block"
    """Rule for a full queue: actors wait (block), or the oldest unroll (keep_latest), the arriving one (keep_oldest) or
    either in turn (alternating) is dropped."""


class QueueStrategy(ReplayStrategy):
    """A strategy that gives each unroll once.

    `_waiting` holds the keys of unrolls in their store, in the order of arrival. The environment id of a copy's key is
    its slot.
    """

    Params = QueueParams
    params: QueueParams
    packs = False  # because a batch must always fit

    def __init__(self, params: QueueParams, memory: Any):
        super().__init__(params, memory)
        self._waiting: deque[tuple[int, int]] = deque()
        copied, length = params.on_full in COPIED, memory.window.length
        self._copies = UnrollStore(memory.trajectories, params.capacity, length, self.packs) if copied else None
        self._free_slots, self._drawn_slots = list(range(self.slots(params))), list[int]()
        self._arrived = self._dropped = self._turn = 0

    # requirements -----------------------------------------------------------------------------------------------------
    @classmethod
    def ring_unrolls(cls, params: QueueParams, batch_size: int, num_actors: int) -> int:
        return (params.capacity + 2 * batch_size) * num_actors

    @classmethod
    def slots(cls, params: QueueParams) -> int:
        return params.capacity if params.on_full in COPIED else 0

    @classmethod
    def max_reuse(cls, params: Any) -> int:
        return 1

    @classmethod
    def problems(cls, params: QueueParams, share: int) -> list[str]:
        if params.on_full not in COPIED or params.capacity >= share:
            return []
        return [
            f"a queue with on_full={params.on_full} must hold its share of a batch: "
            f"capacity={params.capacity} is below {share}"
        ]

    # sampling ---------------------------------------------------------------------------------------------------------
    def has_capacity(self) -> bool:
        return self.params.on_full != "block" or self.memory.unread() < self.params.capacity

    def on_missed(self, count: int) -> None:
        self._arrived += count
        self._drop(count)

    def insert(self, keys: SampleIds) -> None:
        self._arrived += len(keys.env_ids)
        if self._copies:
            for env_id, step_id in zip(*keys):
                self._copy(self._copies, SampleIds(env_id[None], step_id[None]))
            return
        self._waiting.extend(zip(*map(np.ndarray.tolist, keys)))
        # with block, actors may finish chunks that they began before the queue was full
        begun = self.memory.layout.total_envs if self.params.on_full == "block" else 0
        while len(self._waiting) > self.params.capacity + begun:
            self._drop_oldest()

    def draw(self, count: int) -> DrawnUnrolls | None:
        """Return up to `count` unrolls; copies, which cannot be overwritten while they wait, only all at once."""
        if len(self._waiting) < (count if self._copies else 1):
            return None
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self.memory.shared["taken"][0] += len(taken)
        if self._copies:
            self._drawn_slots += [slot for slot, _ in taken]
        return DrawnUnrolls(SampleIds(*np.array(taken, np.int64).T), np.ones(len(taken), bool))

    def on_overwritten(self, count: int) -> None:
        self._dropped += count

    def on_batch_complete(self) -> None:
        self._free_slots += self._drawn_slots
        self._drawn_slots = []

    def statistics(self) -> dict[str, float]:
        return {
            "queue_size": float(len(self._waiting)),
            "queue_inserted": float(self._arrived),
            "queue_dropped": float(self._dropped),
        }

    def _copy(self, copies: UnrollStore, key: SampleIds) -> None:
        """Copy the arriving unroll, or drop it or the oldest one."""
        if not self._free_slots and self._waiting:
            self._turn += self.params.on_full == "alternating"
            if self._turn % 2:  # the oldest one goes
                self._free_slots.append(self._drop_oldest())
        if self._free_slots and copies.put(np.array(self._free_slots[-1:]), key).all():
            env_ids, step_ids = copies.keys(np.array([self._free_slots.pop()]))
            self._waiting.append((int(env_ids[0]), int(step_ids[0])))
        else:
            self._drop(1)

    def _drop_oldest(self) -> int:
        """Drop the oldest waiting unroll; return its environment id."""
        self._drop(1)
        return self._waiting.popleft()[0]

    def _drop(self, count: int) -> None:
        self._dropped += count
        self.memory.shared["taken"][0] += count

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        waiting, copies = [list(pair) for pair in self._waiting], self._copies
        return {
            "counts": [self._arrived, self._dropped, self._turn],
            "waiting": waiting,
            "free": [*self._free_slots],
            "given": [*self._drawn_slots],
            **({"copies": copies.state_dict()} if copies else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._arrived, self._dropped, self._turn = state["counts"]
        self._waiting = deque((env_id, step_id) for env_id, step_id in state["waiting"])
        self._free_slots, self._drawn_slots = list(state["free"]), list(state["given"])
        if self._copies:
            self._copies.load_state_dict(state["copies"])


class QueueMemory(UnrollMemory):
    """A memory that is only a queue, as in IMPALA: unrolls are as old as the actors' parameters."""

    Params = QueueParams

    @classmethod
    def components(cls, params: QueueParams) -> list[MixtureComponent]:
        return [MixtureComponent(QueueStrategy, params, 1.0)]
