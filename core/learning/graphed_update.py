"""Updates on a device that python only starts: sample, learn, write priorities back, several times, from rows that live there.

Where a learner has a Prefetcher and its agent's `learn` otherwise, it has Refreshed and GraphedDeviceUpdate.
"""

from typing import Any

import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput
from core.device.cuda_graph import CudaGraphCallable
from core.device.transfers import upload
from core.learning.metric_accumulator import Tally
from core.memory import DeviceMemory
from core.types import Batch, batch_tensors

LOOK = 100  # calls between looks at how many samples there were


def can_be_captured(agent: type[Agent], params: Any, count: int) -> bool:
    """Whether `count` updates of it are the same work every time."""
    return agent.supports_cuda_graphs and count % agent.update_cycle(params) == 0


class GraphedDeviceUpdate:
    """`count` updates a call. Captured or eager they are the same code; what cannot be captured is not planned either.

    `bad` updates in a row were not finite when `statistics` last looked.
    """

    def __init__(self, agent: Agent, memory: DeviceMemory, batch_size: int, count: int, device: torch.device, *, capture: bool):
        self._planned = can_be_captured(type(agent), agent.params, count)
        if capture and not self._planned:
            raise ValueError(f"{count} updates of {type(agent).__name__} at once cannot be captured")
        self._agent, self._memory, self._batch_size, self.count = agent, memory, batch_size, count
        self._work = CudaGraphCallable(self._updates, device, memory.generators, capture=capture)
        self._tally, self.bad = Tally(device), 0
        self._idle = torch.zeros((), dtype=torch.int64, device=device)  # rows that were no samples, until `samples` looks
        self._calls = self._overcounted = 0

    def __call__(self, memory: DeviceMemory) -> LearnerOutput:
        """All of them; on CUDA they go on when this returns. What they report is left to `statistics`."""
        memory.plan(self.count)
        if self._planned:
            self._agent.prepare_updates(self.count)
        self._work()
        return LearnerOutput({}, None)

    def _updates(self) -> None:
        for _ in range(self.count):
            batch, places = self._memory.sample(self._batch_size)
            output = self._agent.learn(batch)
            if self._agent.samples_per_window > 1:  # windows of one row start where an action was taken
                self._idle.add_(self._agent.count_last_steps(batch.window))
            if output.priorities is not None:
                self._memory.update_priorities(places, output.priorities)
            self._tally.add(output)

    def samples(self, memory: DeviceMemory) -> int:
        """Every row, less those of earlier calls that were none: the device is asked for their number once in LOOK calls."""
        self._calls += 1
        if self._agent.samples_per_window > 1 and self._calls % LOOK == 0:
            self._overcounted += int(self._idle)
            self._idle.zero_()
        rows = self.count * self._batch_size * self._agent.samples_per_window
        left_out = min(self._overcounted, rows)
        self._overcounted -= left_out
        return rows - left_out

    def statistics(self) -> dict[str, float]:
        """Means since the last call; waits for the device."""
        means, self.bad = self._tally.take()
        return means


class GraphedUpdate:
    """An update a call, captured or eager by the same code.

    `bad` updates in a row were not finite when `statistics` last looked.
    """

    count = 1

    def __init__(self, agent: Agent, device: torch.device, *, capture: bool):
        if not can_be_captured(type(agent), agent.params, 1):
            raise ValueError(f"single updates of {type(agent).__name__} cannot be captured")
        self._agent, self._device = agent, device
        self._work = CudaGraphCallable(self._update, device, capture=capture)
        self._batch: Batch | None = None  # on the device
        self._priorities: Tensor | None = None
        self._tally, self.bad = Tally(device), 0

    def __call__(self, batch: Batch) -> LearnerOutput:
        """On CUDA it goes on when this returns. What it reports is left to `statistics`.

        Raises ValueError for a batch of another size than the first.
        """
        if self._batch is None:
            self._batch = self._like(batch)
        for tensor, staged in zip(batch_tensors(batch), batch_tensors(self._batch), strict=True):
            if tensor.shape != staged.shape:
                raise ValueError(f"captured updates are of batches of one size: {list(tensor.shape)} came after {list(staged.shape)}")
            upload(tensor, staged)
        self._agent.prepare_updates(1)
        self._work()
        return LearnerOutput({}, self._priorities)

    def samples(self, batch: Batch) -> int:
        return self._agent.count_samples(batch)

    def _like(self, batch: Batch) -> Batch:
        def empty(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=self._device)

        return Batch(batch.window.map(empty), batch.keys, empty(batch.weights), None if batch.fresh is None else empty(batch.fresh))

    def _update(self) -> None:
        assert self._batch is not None
        output = self._agent.learn(self._batch)
        self._priorities = output.priorities
        self._tally.add(output)

    def statistics(self) -> dict[str, float]:
        """Means since the last call; waits for the device."""
        means, self.bad = self._tally.take()
        return means
