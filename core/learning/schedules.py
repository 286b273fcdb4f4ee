"""Compute numbers that change from update to update: learning rates, exponents, whether a target network is due.

A CUDA graph runs no python, so it reads such numbers from a device tensor, which holds those of the next updates.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from core.device.transfers import upload


def constant(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Return start."""
    return start


def polynomial(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Go from start to end over `updates` as (1 - t) ^ decay, then stay at end."""
    return end + (start - end) * float((1 - min(update / updates, 1.0)) ** decay)


def linear(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Go from start to end linearly over `updates`, then stay at end."""
    return polynomial(update, start, end, updates, 1.0)


def step(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Multiply start by decay every `updates`, never going below end."""
    return max(start * decay ** (update // updates), end)


SCHEDULES = {"constant": constant, "linear": linear, "polynomial": polynomial, "step": step}


class ScheduledTensor:
    """Hold value(update) of the next updates in a device tensor.

    The tensor stays the same, so that captured kernels read new values. `plan` computes the values in python and copies
    them at once; then each update takes its own.
    """

    def __init__(self, value: Callable[[int], float], device: torch.device, dtype: torch.dtype = torch.float32):
        self._value, self._device, self._dtype = value, device, dtype
        self._values: Tensor | None = None  # [count]
        self._next = 0

    def plan(self, first: int, count: int) -> None:
        """Compute the values of updates first .. first + count - 1.

        Raises:
            ValueError: `count` differs from that of the first call.
        """
        if self._values is None:
            self._values = torch.zeros(count, dtype=self._dtype, device=self._device)
        if len(self._values) != count:
            raise ValueError(f"{count} updates are planned where {len(self._values)} were planned before")
        values = np.array([self._value(update) for update in range(first, first + count)])
        upload(values.astype(torch.empty(0, dtype=self._dtype).numpy().dtype), self._values)
        self._next = 0

    def take(self) -> Tensor:
        """Return the scalar of the next update."""
        assert self._values is not None, "nothing was planned"
        value = self._values[self._next]
        self._next = (self._next + 1) % len(self._values)
        return value


class UpdateCounter:
    """Count the updates of an agent.

    Planned updates count when they are planned, because graph launches run no python.
    """

    def __init__(self) -> None:
        self.made = self._begun = 0

    def state_dict(self) -> int:
        return self.made

    def load_state_dict(self, made: int) -> None:
        self.made = self._begun = made

    def plan(self, count: int) -> None:
        self._begun, self.made = self.made, self.made + count

    def next(self) -> int:
        """Return the number, from 1, of the update that begins."""
        self._begun += 1
        self.made = max(self.made, self._begun)
        return self._begun
