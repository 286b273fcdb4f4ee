"""What learners sample: some rows of one stream in a row, and of many streams beside each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class WindowSpec:
    """What a learner samples: rows t .. t + length, and the stacked observations of some of them.

    With crosses_episodes False a position past the end of the episode means its last row, whose observation a truncated
    episode bootstraps from.
    """

    length: int                       # rows after the first
    observations: tuple[int, ...]     # positions in 0 .. length
    crosses_episodes: bool = False
    stride: int = 0                   # 0: windows start at any row; else at its multiples only, and chunks are that long

    def fits(self, window: "Window") -> bool:
        """Return True if the window has the rows and observations that this asks for."""
        return len(window.lasts) == self.length + 1 and len(window.observations) == len(self.observations)


class Window(NamedTuple):
    """T + 1 rows of B streams, time-major. P is the number of observation positions asked for."""

    observations: Tensor       # [P, B, *observation_shape] as stored
    firsts: Tensor             # [T + 1, B] bool
    lasts: Tensor              # [T + 1, B] bool
    actions: Tensor            # [T + 1, B, *action shape]
    rewards: Tensor            # [T + 1, B] float32
    discounts: Tensor          # [T + 1, B] float32
    extras: dict[str, Tensor]  # each [T + 1, B, ...]
    states: tuple[Tensor, ...] = ()  # recurrent state before row 0, each [B, ...]; of windows that start with a chunk

    def to(self, device: torch.device) -> "Window":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Window":
        """function(tensor) of each of its tensors."""
        extras = {name: function(tensor) for name, tensor in self.extras.items()}
        return Window._make([*map(function, self[:6]), extras, tuple(map(function, self.states))])
