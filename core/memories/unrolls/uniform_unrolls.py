"""Uniform sampling of unrolls: the newest ones (`standard`), or a uniform sample of all of them (`reservoir`)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.memories.unrolls.unroll_memory import DrawnUnrolls, ReplayStrategy
from core.memories.unrolls.unroll_slots import UnrollStore
from core.types import SampleIds


@frozen_dataclass
class ReplayParams:
    capacity: int = Field(default=1_000, ge=1, le=10**7)
    """Unrolls that the strategy holds."""


class FifoIndex:
    """An index of the last `capacity` unrolls, in slots that are overwritten in turn; the steps stay in the rings."""

    def __init__(self, capacity: int):
        self._keys = np.zeros((capacity, 2), np.int64)
        self._inserted = 0

    def __len__(self) -> int:
        return min(self._inserted, len(self._keys))

    def insert(self, keys: SampleIds) -> np.ndarray:
        """Insert unrolls; return their slots [K]."""
        slots = (self._inserted + np.arange(len(keys.env_ids))) % len(self._keys)
        self._keys[slots] = np.stack(keys, 1)
        self._inserted += len(slots)
        return slots

    def keys(self, slots: np.ndarray) -> SampleIds:
        """Return the unrolls in these slots."""
        return SampleIds(*self._keys[slots].T)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"inserted": self._inserted, "keys": self._keys.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""
        self._inserted, self._keys[:] = state["inserted"], state["keys"]


class StandardStrategy(ReplayStrategy):
    """A strategy that samples the newest unrolls uniformly."""

    Params = ReplayParams

    def __init__(self, params: ReplayParams, memory: Any):
        super().__init__(params, memory)
        self._index = FifoIndex(params.capacity)

    @classmethod
    def ring_unrolls(cls, params: ReplayParams, batch_size: int, num_actors: int) -> int:
        return params.capacity

    def insert(self, keys: SampleIds) -> None:
        self._index.insert(keys)

    def draw(self, count: int) -> DrawnUnrolls | None:
        return uniform(self._index.keys, len(self._index), self.memory.generator, count)

    def statistics(self) -> dict[str, float]:
        return {"standard_size": float(len(self._index))}

    def state_dict(self) -> dict[str, Any]:
        return self._index.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index.load_state_dict(state)


class ReservoirStrategy(ReplayStrategy):
    """A strategy that keeps a uniform sample of all unrolls by algorithm R (Vitter 1985), as CLEAR (1811.11682) does.

    Unroll i replaces a random one with probability capacity / i. If its compressed frames do not fit, `capacity` falls:
    random unrolls are dropped. A refusal would favour unrolls that compress well.
    """

    Params = ReplayParams
    _copies: UnrollStore

    def __init__(self, params: ReplayParams, memory: Any):
        super().__init__(params, memory)
        self._copies = UnrollStore(memory.trajectories, params.capacity, memory.window.length)
        self._seen = 0

    @classmethod
    def slots(cls, params: ReplayParams) -> int:
        return params.capacity

    def __len__(self) -> int:
        return min(self._seen, self._copies.capacity)

    def insert(self, keys: SampleIds) -> None:
        for env_id, step_id in zip(*keys):
            unroll = SampleIds(env_id[None], step_id[None])
            if self._seen < self._copies.capacity:  # overwritten or too large: an empty slot must not count as filled
                self._seen += int(self._copies.put(np.array([self._seen]), unroll).sum())
            else:
                self._replace(int(self.memory.generator.integers(self._seen + 1)), unroll)
                self._seen += 1

    def _replace(self, slot: int, unroll: SampleIds) -> None:
        """Replace the unroll in a slot below `capacity`, unless the new one was overwritten meanwhile."""
        copies = self._copies
        while slot < copies.capacity and not copies.put(np.array([slot]), unroll).all():
            if not self.memory.trajectories.still_valid(*unroll).all():
                return
            copies.drop_last()  # its frames do not fit; the slots of algorithm R are exchangeable
            slot = min(slot, copies.capacity - 1)

    def draw(self, count: int) -> DrawnUnrolls | None:
        return uniform(self._copies.keys, len(self), self.memory.generator, count)

    def statistics(self) -> dict[str, float]:
        return {"reservoir_size": float(len(self)), "reservoir_inserted": float(self._seen)}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "copies": self._copies.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]
        self._copies.load_state_dict(state["copies"])


def uniform(
    keys: Callable[[np.ndarray], SampleIds], size: int, generator: np.random.Generator, count: int
) -> DrawnUnrolls | None:
    """Draw `count` of the `size` unrolls whose slots `keys` takes, with replacement; if size is 0, return None."""
    return replayed(keys(generator.integers(size, size=count))) if size else None


def replayed(keys: SampleIds) -> DrawnUnrolls:
    """Return unrolls that do not count as drawn for the first time."""
    return DrawnUnrolls(keys, np.zeros(len(keys.env_ids), bool))
