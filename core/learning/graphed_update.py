"""Updates on a device that python only starts: sample, learn, write priorities back, several times, from rows that live there.

Where a learner has a Prefetcher and its agent's `learn` otherwise, it has Refreshed and ResidentUpdates.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput
from core.device.cuda_graph import Captured
from core.memory import Batch, Keys

LOOK = 100  # calls between looks at how many samples there were


class ResidentMemory(ABC):
    """The learner's side of a memory on its device. Made of the memory that actors write to, and that device."""

    @property
    @abstractmethod
    def generators(self) -> tuple[torch.Generator, ...]:
        """That `sample` draws from."""

    @abstractmethod
    def refresh(self) -> bool:
        """Take in what actors have written; False while no legal start exists."""

    @abstractmethod
    def plan(self, count: int) -> None:
        """Before `count` calls of `sample`: what changes from one to the next and is known ahead."""

    @abstractmethod
    def sample(self, batch_size: int) -> tuple[Batch, Tensor]:
        """Windows on the device, and the places [B] of their starts; python looks at no value."""

    @abstractmethod
    def update_priorities(self, places: Tensor, priorities: Tensor) -> None:
        """Of starts sampled since the last `refresh`. Priorities that are not finite change nothing."""

    @abstractmethod
    def statistics(self) -> dict[str, float]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def continue_at(self, updates: int) -> None:
        """As Memory.continue_at."""


def can_be_captured(agent: type[Agent], params: Any, count: int) -> bool:
    """Whether `count` updates of it are the same work every time."""
    return agent.captures and count % agent.period(params) == 0


class ResidentUpdates:
    """`count` updates a call. Captured or eager they are the same code; what cannot be captured is not planned either.

    `bad` updates in a row were not finite when `statistics` last looked.
    """

    def __init__(self, agent: Agent, memory: ResidentMemory, batch_size: int, count: int, device: torch.device, *, capture: bool):
        self._planned = can_be_captured(type(agent), agent.params, count)
        if capture and not self._planned:
            raise ValueError(f"{count} updates of {type(agent).__name__} at once cannot be captured")
        self._agent, self._memory, self._batch_size, self.count = agent, memory, batch_size, count
        self._work = Captured(self._updates, device, memory.generators, capture=capture)
        self._tally, self.bad = Tally(device), 0
        self._idle = torch.zeros((), dtype=torch.int64, device=device)  # rows that were no samples, until `samples` looks
        self._calls = self._overcounted = 0

    def __call__(self, memory: ResidentMemory) -> LearnerOutput:
        """All of them; on CUDA they go on when this returns. What they report is left to `statistics`."""
        memory.plan(self.count)
        if self._planned:
            self._agent.plan(self.count)
        self._work()
        return LearnerOutput({}, None)

    def _updates(self) -> None:
        for _ in range(self.count):
            batch, places = self._memory.sample(self._batch_size)
            output = self._agent.learn(batch)
            if self._agent.samples_per_window > 1:  # windows of one row start where an action was taken
                self._idle.add_(self._agent.idle(batch.window))
            if output.priorities is not None:
                self._memory.update_priorities(places, output.priorities)
            self._tally.add(output)

    def samples(self, memory: ResidentMemory) -> int:
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


class Refreshed:
    """In the place of a Prefetcher: nothing is sampled ahead."""

    starved = takes_priorities = False  # nothing here waits; ResidentUpdates has written them

    def __init__(self, memory: ResidentMemory):
        self._memory = memory

    def update_priorities(self, keys: Keys, priorities: np.ndarray) -> None:
        """They are written already."""

    def get(self, timeout: float) -> ResidentMemory | None:
        """The memory, with all that actors have written; None while there is nothing to learn from."""
        return self._memory if self._memory.refresh() else None

    def put_back(self, memory: ResidentMemory) -> None:
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


class Tally:
    """Running sums of what updates report, on their device and always in the same tensors."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[tuple[str, ...], Tensor] = {}  # of the updates that reported these and changed something: how many, and sums
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)  # so far; in a row at the end; and at the most

    def add(self, output: LearnerOutput) -> None:
        names = tuple(output.statistics)
        if names not in self._sums:
            self._sums[names] = torch.zeros(1 + len(names), device=self._device)
        skipped = torch.as_tensor(output.skipped, device=self._device)
        values = [output.statistics[name].to(self._device, torch.float32) for name in names]
        self._sums[names].add_(torch.where(skipped, 0.0, torch.stack([torch.ones((), device=self._device), *values])))
        lost, row, longest = self._skipped
        row = torch.where(skipped, row + 1, 0)
        self._skipped.copy_(torch.stack([lost + skipped, row, torch.maximum(longest, row)]))

    def take(self) -> tuple[dict[str, float], int]:
        """Means since the last call with the number of skipped updates so far, and how many in a row were since the last call."""
        totals: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for names, sums in self._sums.items():
            count, *values = sums.tolist()
            for name, value in zip(names, values):
                totals[name] += value
                counts[name] += count
            sums.zero_()
        lost, _, longest = self._skipped.tolist()
        self._skipped[2].zero_()
        return {**{name: totals[name] / count for name, count in counts.items() if count}, "skipped_updates": float(lost)}, longest
