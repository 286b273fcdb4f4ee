"""Update target networks: softly after every update, or by a copy after some of them."""

import torch
from torch import Tensor

from core.learning.device_schedule import ScheduledTensor


class TargetUpdater:
    """Move a target network's tensors towards those of the online network.

    - If target_update < 1, each call computes target += target_update * (online - target).
    - Else the target becomes a copy of the online network every target_update updates.
    - The updater is called after every `period` updates. If the optimiser skipped its step, the target stays.
    """

    # Whether a copy is due, for each of the planned updates.
    _due: ScheduledTensor | None = None

    def __init__(self, target_update: float, period: int = 1):
        self._target_update, self._period = target_update, period

    def is_due(self, update: int) -> bool:
        """Return True if a copy became due since the last call. `update` counts from 1."""
        every = int(self._target_update)
        return self._target_update >= 1 and update // every > (update - self._period) // every

    def plan(self, first: int, count: int, device: torch.device) -> None:
        """Plan the next `count` calls, which come after updates first, first + period, and so on.

        From now on the device decides whether a copy is due.
        """
        if self._due is None:
            self._due = ScheduledTensor(lambda call: self.is_due(call * self._period), device, torch.bool)
        self._due.plan(first // self._period, count)

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
            True if the target is a copy now; a tensor if copies were planned.
        """
        if self._target_update < 1:
            if isinstance(applied, Tensor):
                torch._foreach_lerp_(target, online, [applied * self._target_update] * len(target))
            elif applied:
                torch._foreach_lerp_(target, online, self._target_update)
            return False
        if self._due is not None:
            due = self._due.take() & applied
            for tensor, new in zip(target, online):
                torch.where(due, new, tensor, out=tensor)
            return due
        if not (applied and self.is_due(update)):
            return False
        torch._foreach_copy_(target, online)
        return True
