"""Run an agent's updates on batches, and sum their metrics between two reports without reading tensors before."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput
from core.learning.optimizer import MicroBatcher, use_microbatches
from core.types import Batch


class MetricAccumulator:
    """Sum metrics on their device in static tensors, as a CUDA graph requires.

    `consecutive_skipped` is the largest number of updates in a row that were skipped, as of the last `take`.
    """

    def __init__(self, device: torch.device):
        self._device, self.consecutive_skipped = device, 0
        # For each combination of metrics: the number of updates that reported it and were not skipped, then their sums.
        self._sums: dict[tuple[str, ...], Tensor] = {}
        # Skipped updates of the whole run; in a row up to now; the most in a row since the last `take`.
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)

    def add(self, output: LearnerOutput) -> None:
        names = tuple(output.statistics)
        if names not in self._sums:
            self._sums[names] = torch.zeros(1 + len(names), device=self._device)
        skipped = torch.as_tensor(output.skipped, device=self._device)
        values = [output.statistics[name].to(self._device, torch.float32) for name in names]
        one = torch.ones((), device=self._device)
        self._sums[names].add_(torch.where(skipped, 0.0, torch.stack([one, *values])))
        total, in_a_row, most = self._skipped
        in_a_row = torch.where(skipped, in_a_row + 1, 0)
        self._skipped.copy_(torch.stack([total + skipped, in_a_row, torch.maximum(most, in_a_row)]))

    def take(self) -> dict[str, float]:
        """Return the means since the last call, and `nonfinite_updates` of the whole run. This waits for the device."""
        totals: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for names, sums in self._sums.items():
            count, *values = sums.tolist()
            for name, value in zip(names, values):
                totals[name] += value
                counts[name] += count
            sums.zero_()
        skipped, _, self.consecutive_skipped = self._skipped.tolist()
        self._skipped[2].zero_()
        means = {name: totals[name] / count for name, count in counts.items() if count}
        return {**means, "nonfinite_updates": float(skipped)}


class EagerMetricAccumulator:
    """Sum metrics of updates that tell python whether they were skipped.

    `consecutive_skipped` is the number of updates in a row that were skipped up to now.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._skipped = self.consecutive_skipped = 0

    def add(self, output: LearnerOutput) -> None:
        if output.skipped:
            self._skipped += 1
            self.consecutive_skipped += 1
            return
        self.consecutive_skipped = 0
        known = [name for name in output.statistics if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[name] for name in known], [output.statistics[name] for name in known])
        for name, value in output.statistics.items() if len(known) < len(output.statistics) else ():
            if name not in known:
                self._sums[name] = value.to(torch.float32, copy=True)
        self._counts.update(output.statistics.keys())

    def take(self) -> dict[str, float]:
        """Return the means since the last call, and `nonfinite_updates` of the whole run."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, Counter()
        return {**means, "nonfinite_updates": float(self._skipped)}


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
