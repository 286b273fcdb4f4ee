"""The circular buffer of IMPACT (1912.00167, section 3.3): N batches, each learnt from at most K times, in turn.

A batch that was used K times is replaced by a fresh one. While no fresh one is ready, the other batches stay in use.
So where actors are slower than the learner, a fresh batch is used K times in a row; the authors' code (RLlib) waits.
Deviations: if all N batches are used up and none is ready, sampling waits. With on_full=keep_latest actors may
overwrite a batch; the remaining unrolls are then used once more, beside some of the next batch, which counts as a use.
"""

from typing import Any

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.unrolls.queue import QueueParams, QueueStrategy
from core.memories.unrolls.unroll_memory import EMPTY_IDS, DrawnUnrolls, MixtureComponent, UnrollMemory, ids_of
from core.types import SampleIds


@frozen_dataclass
class CircularParams(QueueParams):
    """capacity and on_full are those of the queue that feeds it."""

    num_batches: int = Field(default=4, ge=1, le=10_000)
    """Batches that the memory holds (N of IMPACT: 4 to 16)."""
    max_reuse: int = Field(default=2, ge=1, le=10_000)
    """Times that each unroll is learnt from (K of IMPACT: 2)."""


class CircularStrategy(QueueStrategy):
    """A strategy that gives whole batches, each several times. Fresh unrolls wait in the queue that it extends."""

    Params = CircularParams
    params: CircularParams

    def __init__(self, params: CircularParams, memory: Any):
        super().__init__(params, memory)
        self._gathered: SampleIds = EMPTY_IDS  # of the next fresh batch
        self._batches: list[SampleIds | None] = [None] * params.num_batches
        self._remaining_uses = np.zeros(params.num_batches, np.int64)
        self._next, self._size = 0, 0  # slot of the next draw; unrolls of a whole batch

    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        queued = super().ring_unrolls(params, batch_size, num_actors)
        return int(queued + 2 * params.num_batches * batch_size * num_actors)

    @classmethod
    def max_reuse(cls, params: Any) -> int:
        return int(params.max_reuse)

    @classmethod
    def problems(cls, params: Any, share: int) -> list[str]:
        if params.on_full in ("block", "keep_latest"):
            return []
        return [
            f"on_full={params.on_full} does not suit a circular memory, whose batches stay in the rings: "
            "set block or keep_latest"
        ]

    def draw(self, count: int) -> DrawnUnrolls | None:
        """Return a whole batch, or part of one to replace unrolls that were overwritten."""
        self._size = max(self._size, count)
        for _ in range(self.params.num_batches):
            number, self._next = self._next, (self._next + 1) % self.params.num_batches
            fresh = not self._remaining_uses[number] and self._refill(number)
            if self._remaining_uses[number]:
                return self._use(number, count, fresh)
        return None

    def _refill(self, number: int) -> bool:
        """Replace a batch by a fresh one; return False if the queue does not have enough unrolls."""
        missing = self._size - len(self._gathered.env_ids)
        drawn = super().draw(missing) if missing > 0 else None
        if drawn is not None:
            self._gathered = SampleIds(*(np.concatenate(pair) for pair in zip(self._gathered, drawn.keys)))
        if len(self._gathered.env_ids) < self._size:
            return False
        self._batches[number], self._gathered = self._gathered, EMPTY_IDS
        self._remaining_uses[number] = self.params.max_reuse
        return True

    def _use(self, number: int, count: int, fresh: bool) -> DrawnUnrolls:
        """Return a batch; one that its writers have reached is used for the last time."""
        keys = self._batches[number]
        assert keys is not None
        whole = self.memory.trajectories.still_valid(*keys).all()
        self._remaining_uses[number] = self._remaining_uses[number] - 1 if whole else 0
        used = keys.select(slice(count))
        return DrawnUnrolls(used, np.full(len(used.env_ids), fresh))

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), "remaining_reuses": float(self._remaining_uses.sum())}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        batches = [None if keys is None else [*map(np.ndarray.tolist, keys)] for keys in self._batches]
        return {
            "queue": super().state_dict(),
            "gathered": [*map(np.ndarray.tolist, self._gathered)],
            "batches": batches,
            "uses": self._remaining_uses.tolist(),
            "next": self._next,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["queue"])
        self._gathered, self._next = ids_of(state["gathered"]), state["next"]
        self._remaining_uses[:] = state["uses"]
        self._batches = [None if stored is None else ids_of(stored) for stored in state["batches"]]


class CircularMemory(UnrollMemory):
    """The circular buffer as the only strategy."""

    Params = CircularParams
    window_kinds = ("repeated unrolls",)

    @classmethod
    def components(cls, params: CircularParams) -> list[MixtureComponent]:
        return [MixtureComponent(CircularStrategy, params, 1.0)]
