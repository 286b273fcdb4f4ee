"""Run an agent's updates on batches, and sum their metrics between two reports without reading tensors before.

EagerUpdates calls the agent. GraphedUpdate runs updates on a device, as one launch of a CUDA graph, compiled for the
CPU, or eagerly by the same code. It reads batches from static tensors, which one of two sources fills: StagedBatches
copies batches of a memory on the CPU into them, DeviceReplayBatches samples from a replay on the device and writes its
priorities.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.agent import Agent, LearnerOutput
from core.device.recorded_work import CudaGraphCallable
from core.device.torch_runtime import upload_all
from core.learning.batch_source import Prefetcher
from core.learning.gradients import MICROBATCHER, MicroBatcher
from core.memory import DeviceMemory
from core.model import disable_host_sync
from core.types import Batch, SampleIds, tree_leaves, tree_map

LOOK_PERIOD = 1.0  # seconds between looks at the number of skipped updates on a GPU


class MetricAccumulator:
    """Sum metrics on their device in static tensors, as a CUDA graph requires."""

    def __init__(self, device: torch.device):
        self._device, self._most_skipped, self._next_look = device, 0, 0.0  # monotonic seconds
        # For each combination of metrics: the number of updates that reported it and were not skipped, then their sums.
        self._sums: dict[tuple[str, ...], Tensor] = {}
        # Skipped updates since the learner started; in a row up to now; the most in a row since the last `take`.
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)

    @torch.no_grad()
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
        """Return the means since the last call, and all `nonfinite_updates` so far. This waits for the device."""
        totals: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for names, sums in self._sums.items():
            count, *values = sums.tolist()
            for name, value in zip(names, values):
                totals[name] += value
                counts[name] += count
            sums.zero_()
        skipped, _, self._most_skipped = self._skipped.tolist()
        self._skipped[2].zero_()
        means = {name: totals[name] / count for name, count in counts.items() if count}
        return {**means, "nonfinite_updates": float(skipped)}

    @property
    def consecutive_skipped(self) -> int:
        """Return the largest number of updates in a row that were skipped lately: since the `take` before the last.

        A GPU is asked once in LOOK_PERIOD and at each `take`, because that waits for it.
        """
        if self._device.type == "cpu" or time.monotonic() >= self._next_look:
            self._most_skipped = max(self._most_skipped, int(self._skipped[2]))
            self._next_look = time.monotonic() + LOOK_PERIOD
        return self._most_skipped


class EagerMetricAccumulator:
    """Sum metrics of updates that tell python whether they were skipped.

    `consecutive_skipped` is the number of updates in a row that were skipped up to now.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._skipped = self.consecutive_skipped = 0

    @torch.no_grad()
    def add(self, output: LearnerOutput) -> None:
        if output.skipped:
            self._skipped += 1
            self.consecutive_skipped += 1
            return
        self.consecutive_skipped = 0
        for name, value in output.statistics.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(value, dtype=torch.float32)
        if output.statistics:
            torch._foreach_add_([self._sums[name] for name in output.statistics], list(output.statistics.values()))
        self._counts.update(output.statistics.keys())

    def take(self) -> dict[str, float]:
        """Return the means since the last call, and all `nonfinite_updates` so far."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, Counter()
        return {**means, "nonfinite_updates": float(self._skipped)}


class _Updates:
    """Call an agent's `learn`, and put back what a skipped update changed in the buffers that checkpoints store.

    BatchNorm changes its statistics in the forward pass, before the loss is known not to be finite.
    """

    def __init__(self, agent: Agent, metrics: EagerMetricAccumulator | MetricAccumulator):
        self._agent, self.metrics = agent, metrics
        self._networks = [part for part in agent.checkpoint_parts().values() if isinstance(part, nn.Module)]
        self._buffers = [
            buffer
            for network, stored in ((network, network.state_dict()) for network in self._networks)
            for name, buffer in network.named_buffers()
            if name in stored
        ]

    def _learn(self, batch: Batch) -> LearnerOutput:
        before = [buffer.clone() for buffer in self._buffers]
        output = self._agent.learn(batch)
        if output.skipped is not False:  # which is a tensor where Python may not read it
            with torch.no_grad():
                for buffer, old in zip(self._buffers, before, strict=True):
                    skipped = torch.as_tensor(output.skipped, device=buffer.device)
                    torch.where(skipped, old, buffer, out=buffer)
        self.metrics.add(output)
        return output


class EagerUpdates(_Updates):
    """Call `agent.learn` once a batch. With `microbatch_on_oom`, batches that exceed the GPU's memory are split."""

    updates_per_call = 1
    is_planned = False

    def __init__(self, agent: Agent, microbatch_on_oom: bool):
        super().__init__(agent, EagerMetricAccumulator())
        self._microbatcher = MicroBatcher() if microbatch_on_oom else None

    def __call__(self, batch: Batch) -> LearnerOutput:
        token = MICROBATCHER.set(self._microbatcher)
        try:
            return self._learn(batch)
        finally:
            MICROBATCHER.reset(token)

    def statistics(self) -> dict[str, float]:
        """Return mean metrics; with microbatches also `batch_size`, the windows of one gradient."""
        size = {} if self._microbatcher is None else {"batch_size": float(self._microbatcher.size)}
        return {**self.metrics.take(), **size}


def can_capture(agent: type[Agent], params: Any, count: int) -> bool:
    """Return True if `count` updates of the agent launch the same kernels every time."""
    return agent.supports_cuda_graphs and count % agent.update_cycle(params) == 0


class StagedBatches:
    """Copy each batch into tensors of the device that stay the same, for one update a call. All have one size."""

    updates_per_call = 1
    generators = ()

    def __init__(self, device: torch.device):
        self.device = device
        self._batch: Batch | None = None
        # Of the last update, [B], for the caller to write.
        self.priorities: Tensor | None = None

    def load(self, batch: Batch) -> None:
        """Copy a batch to the device. This is not captured."""
        loaded = batch.window, batch.weights, batch.fresh
        if self._batch is None:
            static_batch = tree_map(lambda tensor: torch.empty_like(tensor, device=self.device), loaded)
            window, weights, fresh = static_batch
            self._batch = Batch(window, batch.keys, weights, fresh, batch.on_policy)
            self._static = tree_leaves(static_batch)
        upload_all(tree_leaves(loaded), self._static)

    def sample(self) -> Batch:
        assert self._batch is not None
        return self._batch

    def finish_update(self, priorities: Tensor | None) -> None:
        if priorities is None or self.priorities is None:
            self.priorities = priorities
        else:
            self.priorities.copy_(priorities)


class DeviceReplayBatches:
    """Sample each batch from a replay on the device and write its priorities there, for `updates_per_call` updates.

    To the learner, which asks it for batches as it asks a Prefetcher, the replay itself is the batch.
    """

    priorities: Tensor | None = None
    starved = takes_priorities = False

    def __init__(self, memory: DeviceMemory, batch_size: int, updates_per_call: int, device: torch.device):
        self._memory, self._batch_size = memory, batch_size
        self.updates_per_call, self.device = updates_per_call, device
        self.generators = (memory.generator,)
        self._needs_priorities = memory.takes_priorities

    # for the learner --------------------------------------------------------------------------------------------------
    def get(self, timeout: float) -> Any:
        """Return the memory with all that actors have written, or None while there is nothing to sample."""
        return self._memory if self._memory.refresh() else None

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Do nothing: updates write their priorities."""

    def put_back(self, memory: Any) -> None:
        """Do nothing: the memory stays the next batch."""

    def ready_batches(self) -> list[Batch]:
        return []

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: there is no thread."""

    # for updates ------------------------------------------------------------------------------------------------------
    def load(self, memory: DeviceMemory) -> None:
        """Plan what changes between samples. This is not captured."""
        memory.plan(self.updates_per_call)

    def sample(self) -> Batch:
        batch, self._leaf_indices = self._memory.sample(self._batch_size)
        return batch

    def finish_update(self, priorities: Tensor | None) -> None:
        if priorities is not None:
            self._memory.update_priorities(self._leaf_indices, priorities)
        elif self._needs_priorities:
            raise ValueError(f"priorities of an update are missing: {type(self._memory).__name__} needs them")


class GraphedUpdate(_Updates):
    """Run one or several updates a call.

    - Learning rates and all else that changes between updates in a known way are scheduled on the device before each
      call.
    - Updates that do not launch the same kernels every time run eagerly and are not scheduled, unless they are
      compiled.

    Args:
        agent: The agent.
        batches: The source of batches.
        capture: True to capture a CUDA graph. Raises ValueError if the updates cannot be captured.
        compiled: Makes a compiled callable of the work and of the number of calls after which it repeats. The work is
            the updates, or those parts of them that `Agent.compile_parts` names. If None, nothing is compiled.
    """

    def __init__(
        self,
        agent: Agent,
        batches: StagedBatches | DeviceReplayBatches,
        *,
        capture: bool,
        compiled: Callable[[Callable[[], None], int], Callable[[], None]] | None = None,
    ):
        self._batches, self.updates_per_call = batches, batches.updates_per_call
        self.is_planned = can_capture(type(agent), agent.params, self.updates_per_call) or compiled is not None
        if capture and not self.is_planned:
            raise ValueError(f"{self.updates_per_call} updates of {type(agent).__name__} at once cannot be captured")
        super().__init__(agent, MetricAccumulator(batches.device))
        if self.is_planned:
            for network in self._networks:
                disable_host_sync(network)
        self._launch: Callable[[], None] = self._run_updates  # in Python, also where their parts are compiled
        if capture:
            self._launch = CudaGraphCallable(self._run_updates, batches.device, batches.generators)
        elif compiled is not None and not agent.compile_parts(compiled):
            self._launch = compiled(self._run_updates, agent.update_cycle(agent.params))

    def __call__(self, batch: Any) -> LearnerOutput:
        """Launch the updates. On CUDA this returns before they finish; `statistics` reads their metrics."""
        self._batches.load(batch)
        if self.is_planned:
            self._agent.prepare_updates(self.updates_per_call)
        self._launch()
        priorities = self._batches.priorities
        # A copy, because the next call overwrites them.
        return LearnerOutput({}, None if priorities is None else priorities.clone())

    def _run_updates(self) -> None:
        for _ in range(self.updates_per_call):
            self._batches.finish_update(self._learn(self._batches.sample()).priorities)

    def statistics(self) -> dict[str, float]:
        """Return the mean metrics of the updates since the last call."""
        return self.metrics.take()


BatchSource = Prefetcher | DeviceReplayBatches
Updater = EagerUpdates | GraphedUpdate
