"""Numbers that differ from update to update and are known ahead: learning rates, exponents, when a target network is due; and the count of
updates that are planned ahead."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from core.device.transfers import upload


class ScheduledTensor:
    """value(update) of the next updates, on a device. `plan` computes them in python and copies them there in one go; then each update
    takes its own. The tensor stays the same, so that what was recorded with it reads the new numbers."""

    def __init__(self, value: Callable[[int], float], device: torch.device, dtype: torch.dtype = torch.float32):
        self._value, self._device, self._dtype = value, device, dtype
        self._values: Tensor | None = None  # [count]
        self._next = 0

    def plan(self, first: int, count: int) -> None:
        """Of updates first .. first + count - 1. Raises ValueError for another count than the first time's."""
        if self._values is None:
            self._values = torch.zeros(count, dtype=self._dtype, device=self._device)
        if len(self._values) != count:
            raise ValueError(f"{count} updates are planned where {len(self._values)} were planned before")
        values = np.array([self._value(update) for update in range(first, first + count)])
        upload(values.astype(torch.empty(0, dtype=self._dtype).numpy().dtype), self._values)
        self._next = 0

    def take(self) -> Tensor:
        """The next one, a scalar."""
        assert self._values is not None, "nothing was planned"
        value = self._values[self._next]
        self._next = (self._next + 1) % len(self._values)
        return value


class UpdateCounter:
    """Updates that an agent has made. Planned ones count when they are planned, since replays of them run no python."""

    def __init__(self) -> None:
        self.made = self._begun = 0

    def restore(self, made: int) -> None:
        self.made = self._begun = made

    def plan(self, count: int) -> None:
        self._begun, self.made = self.made, self.made + count

    def next(self) -> int:
        """The number, from 1, of the update that begins."""
        self._begun += 1
        self.made = max(self.made, self._begun)
        return self._begun
