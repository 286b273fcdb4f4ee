"""Target networks: a copy of a network that follows it slowly, softly at every update or by copies now and then."""

import torch
from torch import Tensor

from core.learning.device_schedule import ScheduledTensor


class TargetUpdater:
    """Brings a target's tensors nearer to the online ones.

    target_update below 1: target += target_update (online - target) each time; else a copy every that many updates. It is called after
    every `period` updates; one in which no step was taken leaves the target as it was.
    """

    _due: ScheduledTensor | None = None  # of planned updates: whether a copy is

    def __init__(self, target_update: float, period: int = 1):
        self._target_update, self._period = target_update, period

    def is_due(self, update: int) -> bool:
        """Return True if the target becomes a copy after update number `update`, from 1: since the last call one was due."""
        every = int(self._target_update)
        return self._target_update >= 1 and update // every > (update - self._period) // every

    def plan(self, first: int, count: int, device: torch.device) -> None:
        """The next `count` calls come after updates first, first + period ..: from now on the device knows what is due."""
        if self._due is None:
            self._due = ScheduledTensor(lambda call: self.is_due(call * self._period), device, torch.bool)
        self._due.plan(first // self._period, count)

    @torch.no_grad()
    def __call__(self, target: list[Tensor], online: list[Tensor], update: int, stepped: bool | Tensor = True) -> bool | Tensor:
        """Follow after update number `update`, or the next planned one, if its step was taken: `stepped`, a tensor if it was planned.
        Returns whether the target is a copy now, planned as a tensor."""
        if self._target_update < 1:
            if isinstance(stepped, Tensor):
                torch._foreach_lerp_(target, online, [stepped * self._target_update] * len(target))
            elif stepped:
                torch._foreach_lerp_(target, online, self._target_update)
            return False
        if self._due is not None:
            due = self._due.take() & stepped
            for tensor, new in zip(target, online):
                torch.where(due, new, tensor, out=tensor)
            return due
        if not (stepped and self.is_due(update)):
            return False
        torch._foreach_copy_(target, online)
        return True
