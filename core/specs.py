"""Shapes and dtypes without behaviour: of arrays, actions, environments and windows."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from core.types import Window


class ArraySpec(NamedTuple):
    """Shape and numpy dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize  # python's integers do not overflow


class Discrete(NamedTuple):
    """num_actions actions, 0 .. num_actions - 1; stored as int64 scalars."""

    num_actions: int

    @property
    def array(self) -> ArraySpec:
        return ArraySpec((), "int64")


class Continuous(NamedTuple):
    """Actions within [low, high], element by element; stored as float32 of this shape."""

    low: np.ndarray
    high: np.ndarray

    @property
    def array(self) -> ArraySpec:
        return ArraySpec(self.low.shape, "float32")


@dataclass(frozen=True)
class EnvSpec:
    """What agents, models and memories know of an environment."""

    name: str                        # canonical game name: "pong", "CartPole-v1"
    frame: ArraySpec                 # one observation of one stream as it is stored, without the stack
    frame_stack: int                 # 0: observation is one frame; S >= 1: [S, *frame.shape], oldest first, zeros before the start
    action: Discrete | Continuous
    frames_per_step: int = 1         # emulator frames an agent step
    is_image: bool = False           # [H, W], [H, W, C] or planes: wants a convolution
    max_value: float = 1.0           # pixels are divided by it (255 for bytes)
    reward_threshold: float | None = None  # return from which on an episode counts as solved; None: no such number is known
    frame_rate: float = 60.0         # emulator frames a second, at which the environment is meant to be watched
    warning: str = ""                # what its user should know before a start, one sentence

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return (self.frame_stack, *self.frame.shape) if self.frame_stack else self.frame.shape


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
