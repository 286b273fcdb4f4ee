"""Sources of batches for updates: drawn ahead, in place, or in pieces."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from core.agent import Agent, LearnerOutput
from core.learning.microbatches import Pieces, in_pieces
from core.memory import DeviceMemory
from core.types import Batch, SampleIds


class InPlaceBatchSource:
    """In the place of a Prefetcher: nothing is sampled ahead."""

    starved = takes_priorities = False  # nothing here waits; GraphedDeviceUpdate has written them

    def __init__(self, memory: DeviceMemory):
        self._memory = memory

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """They are written already."""

    def get(self, timeout: float) -> DeviceMemory | None:
        """The memory, with all that actors have written; None while there is nothing to learn from."""
        return self._memory if self._memory.refresh() else None

    def put_back(self, memory: DeviceMemory) -> None:
        """Nothing was drawn yet."""

    def drawn(self) -> list[Batch]:
        return []

    def call(self, function: Callable[[], Any]) -> Any:
        """function() between updates."""
        return function()

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """There is no thread to end."""


class Batches(Protocol):
    """What is learnt from next, as a Prefetcher gives it."""

    starved: bool           # rows had to be waited for before the last `get`
    takes_priorities: bool  # else what an update says of its windows is not asked for

    def get(self, timeout: float) -> Any: ...

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None: ...

    def put_back(self, batch: Any, /) -> None: ...

    def drawn(self) -> list[Batch]: ...

    def call(self, function: Callable[[], Any]) -> Any: ...

    def statistics(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


class Learn(Protocol):
    """Learns from what a Batches gives: `count` updates a call; `bad` of them in a row were not finite before the last one."""

    count: int
    bad: int

    def __call__(self, batch: Any, /) -> LearnerOutput: ...

    def samples(self, batch: Any, /) -> int:
        """Return the agent steps that a call with this batch learnt from."""

    def statistics(self) -> Mapping[str, float]: ...


class EagerUpdates:
    """An agent's `learn`; with `shrink`, gradients of batches that do not fit into the GPU's memory are taken of pieces that do."""

    def __init__(self, agent: Agent, shrink: bool):
        self._agent, self._pieces = agent, Pieces() if shrink else None
        self.count, self.bad = 1, 0  # updates a call; in a row that were not finite before the one in hand

    def __call__(self, batch: Batch) -> LearnerOutput:
        if self._pieces is None:
            return self._agent.learn(batch)
        with in_pieces(self._pieces):
            return self._agent.learn(batch)

    def samples(self, batch: Batch) -> int:
        return self._agent.count_samples(batch)

    def statistics(self) -> dict[str, float]:
        """batch_size: windows whose gradient is taken at once."""
        return {} if self._pieces is None else {"batch_size": float(self._pieces.size)}
