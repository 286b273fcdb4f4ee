"""Replay of unrolls: the newest ones (`standard`), or a uniform sample of all there ever were (`reservoir`); both drawn uniformly."""

from typing import Any, Protocol

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.unrolls.strategy import DrawnUnrolls, ReplayStrategy
from core.memories.unrolls.unroll_slots import UnrollStore
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds


@frozen_dataclass
class ReplayParams:
    capacity: int = Field(default=1_000, ge=1, le=10**7)
    """Unrolls that the rule holds."""


class Places(Protocol):
    """Where unrolls stand: 0 .. len - 1."""

    def __len__(self) -> int: ...

    def keys(self, places: np.ndarray) -> SampleIds: ...


class FifoIndex:
    """Keys of the last `capacity` unrolls, in places 0 .. capacity - 1 that are overwritten in turn; the rows stay in the rings."""

    def __init__(self, capacity: int):
        self._keys = np.zeros((capacity, 2), np.int64)
        self._inserted = 0

    def __len__(self) -> int:
        return min(self._inserted, len(self._keys))

    def insert(self, keys: SampleIds) -> np.ndarray:
        """Returns the places [K] they went to."""
        places = (self._inserted + np.arange(len(keys.streams))) % len(self._keys)
        self._keys[places] = np.stack(keys, 1)
        self._inserted += len(places)
        return places

    def keys(self, places: np.ndarray) -> SampleIds:
        return SampleIds(*self._keys[places].T)

    def state_dict(self) -> dict[str, Any]:
        return {"inserted": self._inserted, "keys": self._keys.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inserted, self._keys[:] = state["inserted"], state["keys"]


class StandardRule(ReplayStrategy):
    """Uniform over the newest unrolls."""

    Params = ReplayParams

    def __init__(self, params: Any, memory: Any):
        super().__init__(params, memory)
        self._places = FifoIndex(params.capacity)

    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        return params.capacity

    def insert(self, keys: SampleIds) -> None:
        self._places.insert(keys)

    def draw(self, count: int) -> DrawnUnrolls | None:
        return uniform(self._places, self.memory.generator, count)

    def statistics(self) -> dict[str, float]:
        return {"standard_size": float(len(self._places))}

    def state_dict(self) -> dict[str, Any]:
        return self._places.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._places.load_state_dict(state)


class ReservoirRule(ReplayStrategy):
    """Algorithm R (Vitter 1985), as CLEAR (1811.11682) keeps its replay.

    The i-th unroll replaces a random one with probability capacity / i.
    """

    Params = ReplayParams

    def __init__(self, params: Any, memory: Any):
        super().__init__(params, memory)
        self._copies = UnrollStore(memory.trajectories, params.capacity, memory.window.length)
        self._seen = 0

    @classmethod
    def slots(cls, params: Any) -> int:
        return params.capacity

    @property
    def store(self) -> Trajectories:
        return self._copies.store

    def __len__(self) -> int:
        return min(self._seen, self._copies.capacity)

    def keys(self, slots: np.ndarray) -> SampleIds:
        return self._copies.keys(slots)

    def insert(self, keys: SampleIds) -> None:
        for stream, serial in zip(*keys):
            filling = self._seen < self._copies.capacity
            slot = self._seen if filling else int(self.memory.generator.integers(self._seen + 1))
            if slot < self._copies.capacity:
                stored = self._copies.put(np.array([slot]), SampleIds(stream[None], serial[None])).all()
                if filling and not stored:
                    continue  # its writer was faster or there is no room, and an empty slot must not count as filled
            self._seen += 1

    def draw(self, count: int) -> DrawnUnrolls | None:
        return uniform(self, self.memory.generator, count)

    def statistics(self) -> dict[str, float]:
        return {"reservoir_size": float(len(self)), "reservoir_seen": float(self._seen)}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "copies": self._copies.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]
        self._copies.load_state_dict(state["copies"])


def uniform(places: Places, generator: np.random.Generator, count: int) -> DrawnUnrolls | None:
    """`count` of the places, with replacement; None while there are none."""
    return replayed(places.keys(generator.integers(len(places), size=count))) if len(places) else None


def replayed(keys: SampleIds) -> DrawnUnrolls:
    return DrawnUnrolls(keys, np.zeros(len(keys.streams), bool))
