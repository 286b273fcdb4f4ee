"""Run an agent's updates on batches, and accumulate their metrics."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from core.agent import Agent, LearnerOutput
from core.learning.metric_accumulator import EagerMetricAccumulator
from core.learning.microbatches import MicroBatcher, use_microbatches
from core.types import Batch


class Updates(Protocol):
    """Update an agent `count` times a call. The other implementation is core/learning/graphed_update.py."""

    count: int

    def __call__(self, batch: Any, /) -> LearnerOutput: ...

    @property
    def consecutive_skipped(self) -> int:
        """Return how many updates in a row were skipped because they were not finite, as far as is known."""

    def samples(self, batch: Any, /) -> int:
        """Return the agent steps that a call with this batch learned from."""

    def statistics(self) -> Mapping[str, float]:
        """Return the mean metrics of the updates since the last call."""


class EagerUpdates:
    """Call `agent.learn` once a batch. With `microbatch_on_oom`, batches that exceed the GPU's memory are split."""

    count = 1

    def __init__(self, agent: Agent, microbatch_on_oom: bool):
        self._agent, self._microbatcher = agent, MicroBatcher() if microbatch_on_oom else None
        self._metrics = EagerMetricAccumulator()

    def __call__(self, batch: Batch) -> LearnerOutput:
        with nullcontext() if self._microbatcher is None else use_microbatches(self._microbatcher):
            output = self._agent.learn(batch)
        self._metrics.add(output)
        return output

    @property
    def consecutive_skipped(self) -> int:
        return self._metrics.consecutive_skipped

    def samples(self, batch: Batch) -> int:
        return self._agent.count_samples(batch)

    def statistics(self) -> dict[str, float]:
        """Return mean metrics; with microbatches also `batch_size`, the windows of one gradient."""
        size = {} if self._microbatcher is None else {"batch_size": float(self._microbatcher.size)}
        return {**self._metrics.take(), **size}
