"""Target networks: a copy of a network that follows it slowly, softly at every update or by copies now and then."""

import torch
from torch import Tensor

from core.planned import Planned


class Follower:
    """Brings a target's tensors nearer to the online ones.

    target_update below 1: target += target_update (online - target) each time; else a copy every that many updates.
    """

    _due: Planned | None = None  # of planned updates: whether a copy is

    def __init__(self, target_update: float):
        self._target_update = target_update

    def is_due(self, update: int) -> bool:
        """Whether the target becomes a copy after update number `update`, from 1."""
        return self._target_update >= 1 and update % int(self._target_update) == 0

    def plan(self, first: int, count: int, device: torch.device) -> None:
        """The next `count` calls come after updates first, first + 1 ..: from now on the device knows what is due."""
        if self._due is None:
            self._due = Planned(self.is_due, device, torch.bool)
        self._due.plan(first, count)

    @torch.no_grad()
    def __call__(self, target: list[Tensor], online: list[Tensor], update: int) -> bool | Tensor:
        """After update number `update`, or the next planned one. Returns whether the target is a copy now, planned as a tensor."""
        if self._target_update < 1:
            torch._foreach_lerp_(target, online, self._target_update)
            return False
        if self._due is not None:
            due = self._due.take()
            for tensor, new in zip(target, online):
                torch.where(due, new, tensor, out=tensor)
            return due
        if not self.is_due(update):
            return False
        torch._foreach_copy_(target, online)
        return True
