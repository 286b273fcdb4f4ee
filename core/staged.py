"""Captured updates on batches that arrive from the CPU: each is copied into tensors of the device that stay the same."""

import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput, samples_of
from core.device.cuda_graph import Captured
from core.device.transfers import upload
from core.learning.graphed_update import Tally, can_be_captured
from core.memory import Batch, tensors


class StagedUpdates:
    """An update a call, captured or eager by the same code.

    `bad` updates in a row were not finite when `statistics` last looked.
    """

    count = 1

    def __init__(self, agent: Agent, device: torch.device, *, capture: bool):
        if not can_be_captured(type(agent), agent.params, 1):
            raise ValueError(f"single updates of {type(agent).__name__} cannot be captured")
        self._agent, self._device = agent, device
        self._work = Captured(self._update, device, capture=capture)
        self._batch: Batch | None = None  # on the device
        self._priorities: Tensor | None = None
        self._tally, self.bad = Tally(device), 0

    def __call__(self, batch: Batch) -> LearnerOutput:
        """On CUDA it goes on when this returns. What it reports is left to `statistics`.

        Raises ValueError for a batch of another size than the first.
        """
        if self._batch is None:
            self._batch = self._like(batch)
        for tensor, staged in zip(tensors(batch), tensors(self._batch), strict=True):
            if tensor.shape != staged.shape:
                raise ValueError(f"captured updates are of batches of one size: {list(tensor.shape)} came after {list(staged.shape)}")
            upload(tensor, staged)
        self._agent.plan(1)
        self._work()
        return LearnerOutput({}, self._priorities)

    def samples(self, batch: Batch) -> int:
        return samples_of(self._agent, batch)

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
