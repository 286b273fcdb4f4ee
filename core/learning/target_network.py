"""Update target networks: a step towards the online network every few updates."""

import torch
from torch import Tensor

from core.learning.schedules import ScheduledTensor


class TargetUpdater:
    """Move a target network's tensors towards those of the online network.

    - Every `period` updates, target += tau * (online - target); with tau = 1 the target becomes a copy.
    - The updater is called after every `updates_per_call` updates. If the optimiser skipped its step, the target stays.
    """

    # Whether an update of the target is due, for each of the planned calls.
    _due: ScheduledTensor | None = None

    def __init__(self, period: int, tau: float = 1.0, updates_per_call: int = 1):
        self._period, self._tau, self._updates_per_call = period, tau, updates_per_call

    def is_due(self, update: int) -> bool:
        """Return True if an update of the target became due since the last call. `update` counts from 1."""
        return update // self._period > (update - self._updates_per_call) // self._period

    def plan(self, first: int, count: int, device: torch.device) -> None:
        """Plan the next `count` calls, which come after updates first, first + updates_per_call, and so on.

        From now on the device decides whether an update of the target is due.
        """
        if self._due is None:
            self._due = ScheduledTensor(lambda call: self.is_due(call * self._updates_per_call), device, torch.bool)
        self._due.plan(first // self._updates_per_call, count)

    @torch.no_grad()
    def __call__(
        self, target: list[Tensor], online: list[Tensor], update: int, applied: bool | Tensor = True
    ) -> bool | Tensor:
        """Update the target after update number `update`, or after the next planned one.

        Args:
            target: tensors that are changed in place.
            online: tensors of the same shapes.
            update: number of the update, from 1; ignored if updates are planned.
            applied: the optimiser stepped; a tensor if the update was planned.

        Returns:
            True if the target moved; a tensor if the update was planned.
        """
        if self._due is not None:
            due = self._due.take() & applied
            if self._tau < 1:
                torch._foreach_lerp_(target, online, [due * self._tau] * len(target))
            else:
                for tensor, new in zip(target, online):
                    torch.where(due, new, tensor, out=tensor)
            return due
        if not (applied and self.is_due(update)):
            return False
        if self._tau < 1:
            torch._foreach_lerp_(target, online, self._tau)
        else:
            torch._foreach_copy_(target, online)
        return True
