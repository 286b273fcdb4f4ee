"""Give a learner the batches of its updates."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from core.memory import DeviceMemory
from core.types import Batch, SampleIds


class BatchSource(Protocol):
    """Give batches and take priorities. The other implementation is core/learning/prefetcher.py."""

    # True if the memory had nothing to sample before the last `get`, so that the wait was not for sampling.
    starved: bool
    # If False, priorities are not read back from the device.
    takes_priorities: bool

    def get(self, timeout: float) -> Any:
        """Return the next batch, or None if there is none after `timeout` seconds."""

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None: ...

    def put_back(self, batch: Any, /) -> None:
        """Make the batch that `get` returned last the next one again, because it was not learned from."""

    def ready_batches(self) -> list[Batch]:
        """Return the sampled batches that `get` has not returned, oldest first."""

    def call(self, function: Callable[[], Any]) -> Any:
        """Return function(), called while nothing else uses the memory."""

    def statistics(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


class InPlaceBatchSource:
    """Give a device replay itself as the batch: updates sample from it and write its priorities (GraphedUpdate)."""

    starved = takes_priorities = False

    def __init__(self, memory: DeviceMemory):
        self._memory = memory

    def get(self, timeout: float) -> DeviceMemory | None:
        """Return the memory with all that actors have written, or None while there is nothing to sample."""
        return self._memory if self._memory.refresh() else None

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        pass

    def put_back(self, memory: DeviceMemory) -> None:
        pass

    def ready_batches(self) -> list[Batch]:
        return []

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
