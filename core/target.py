"""Target networks: a copy of a network that follows it slowly, softly at every update or by copies now and then."""

import torch
from torch import Tensor


@torch.no_grad()
def follow(target: list[Tensor], online: list[Tensor], target_update: float, updates: int) -> None:
    """Bring the target's tensors nearer to the online ones, after `updates` of them.

    target_update below 1: target += target_update (online - target) each time; else a copy every that many updates.
    """
    if target_update < 1:
        torch._foreach_lerp_(target, online, target_update)
    elif updates % int(target_update) == 0:
        torch._foreach_copy_(target, online)
