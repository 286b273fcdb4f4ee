"""Shapes and dtypes without behaviour: arrays, actions, environments and windows."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from core.types import Window

# Kinds of windows. An agent lists those that it learns from, a memory those that it holds; a run needs one that both
# list.
WindowKind = Literal[
    "transitions",  # n-step transitions, which start at any step
    "sequences",  # overlapping sequences, which start with a chunk and its stored recurrent state
    "rollouts",  # one whole chunk of every environment, by the newest parameters: actors wait for them
    "unrolls",  # whole chunks, in the order in which actors publish them or replayed
    "repeated unrolls",  # batches of unrolls that stay together and are learnt from several times
]


# What a part of an observation becomes.
PartKind = Literal[
    "picture",  # bytes [H, W] or [H, W, planes], for a convolution
    "vector",  # numbers
    "one-hot",  # an integer as a vector of zeros and a one
    "text",  # left out
    "left out",  # by env.observation_keys
]


class ArraySpec(NamedTuple):
    """Shape and numpy dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the size of such an array in bytes, as a Python integer because numpy's would overflow."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Discrete(NamedTuple):
    """Actions 0 .. num_actions - 1, stored as int64 scalars."""

    num_actions: int
    nvec: tuple[int, ...] = ()  # of the MultiDiscrete space whose combinations these are, the last choice fastest

    @property
    def array(self) -> ArraySpec:
        """Return shape and dtype of one stored action."""
        return ArraySpec((), "int64")

    @property
    def description(self) -> str:
        """Return what a table says of the space."""
        combined = f", all combinations of {_times(self.nvec)} choices" if self.nvec else ""
        return f"{self.num_actions:,} actions{combined}"

    @property
    def choice_sizes(self) -> tuple[int, ...]:
        """Return the number of actions of each choice; their sum is the length of a policy's logits and of a mask."""
        return (self.num_actions,)


class MultiDiscrete(NamedTuple):
    """Several choices at once, stored as int64 [choices]: choice i is one of 0 .. nvec[i] - 1."""

    nvec: tuple[int, ...]

    @property
    def array(self) -> ArraySpec:
        """Return shape and dtype of one stored action."""
        return ArraySpec((len(self.nvec),), "int64")

    @property
    def description(self) -> str:
        """Return what a table says of the space."""
        return f"{len(self.nvec)} choices at once among {_times(self.nvec)}"

    @property
    def choice_sizes(self) -> tuple[int, ...]:
        """Return the number of actions of each choice; their sum is the length of a policy's logits and of a mask."""
        return self.nvec

    @property
    def num_joint_actions(self) -> int:
        """Return the number of combinations of choices."""
        return math.prod(self.nvec)


class Continuous(NamedTuple):
    """Actions within [low, high], element by element, stored as float32 of this shape."""

    low: np.ndarray
    high: np.ndarray

    @property
    def array(self) -> ArraySpec:
        """Return shape and dtype of one stored action."""
        return ArraySpec(self.low.shape, "float32")

    @property
    def description(self) -> str:
        """Return what a table says of the space."""
        ranges = dict.fromkeys(f"{low:g} .. {high:g}" for low, high in zip(self.low.flat, self.high.flat))
        if 1 < len(ranges) <= 4:
            return f"in {', '.join(ranges)}"
        return f"in {self.low.min():g} .. {self.high.max():g}{', each in its own bounds' * (len(ranges) > 1)}"


class Mixed(NamedTuple):
    """Choices and numbers at once, stored as float32 [choices + numbers].

    Choice i is one of 0 .. nvec[i] - 1. The numbers behind the choices are within [low, high], each [numbers].
    """

    nvec: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray

    @property
    def array(self) -> ArraySpec:
        """Return shape and dtype of one stored action."""
        return ArraySpec((len(self.nvec) + len(self.low),), "float32")

    @property
    def description(self) -> str:
        """Return what a table says of the space."""
        numbers = f"{len(self.low)} numbers {self.continuous.description}"
        return f"{MultiDiscrete(self.nvec).description}, and {numbers}"

    @property
    def choice_sizes(self) -> tuple[int, ...]:
        """Return the number of actions of each choice; their sum is the length of a mask."""
        return self.nvec

    @property
    def continuous(self) -> Continuous:
        """Return the space of the numbers alone."""
        return Continuous(self.low, self.high)


ActionSpec = Discrete | MultiDiscrete | Continuous | Mixed


def _times(nvec: tuple[int, ...]) -> str:
    """Return the numbers as "3 x 2 x 2", or many equal ones as "2 ^ 16"."""
    if len(nvec) > 4 and len(set(nvec)) == 1:
        return f"{nvec[0]} ^ {len(nvec)}"
    return " x ".join(map(str, nvec))


class ObservationPart(NamedTuple):
    """One leaf of an environment's observation space, and what it becomes."""

    name: str  # path in nested spaces: "goal.position"
    space: str  # as the environment describes it
    kind: PartKind
    shape: tuple[int, ...]  # as it is stored, without the stack; () if it is not stored


@dataclass(frozen=True)
class EnvSpec:
    """Everything that agents, models and memories know of an environment."""

    name: str  # canonical game name: "pong", "CartPole-v1"
    frame: ArraySpec  # one stored observation of one environment, without the stack
    frame_stack: int  # 0: one frame is an observation; S >= 1: [S, *frame.shape], oldest first, 0-padded
    action: ActionSpec
    frames_per_step: int = 1  # emulator frames of an agent step
    is_image: bool = False  # [H, W], [H, W, C] or planes, which need a convolution
    max_value: float = 1.0  # pixels are divided by this (255 for bytes)
    reward_threshold: float | None = None  # return from which an episode counts as solved; None if it is not known
    frame_rate: float = 60.0  # emulator frames a second, at which the environment is meant to be watched
    warning: str = ""  # one sentence that the user should know before a start
    parts: tuple[ObservationPart, ...] = ()  # of the observation; empty if it has one part
    has_action_mask: bool = False  # time steps say which actions are legal; actions are not Continuous
    # If not (): a frame is the bytes of a picture of this shape, followed by those of a float32 vector.
    picture_of_parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for fields that contradict each other, or leave nothing to choose or to learn from."""
        if not isinstance(self.action, ActionSpec):
            raise ValueError(f"action={self.action!r} is none of Discrete, MultiDiscrete, Continuous and Mixed")
        if (isinstance(self.action, Discrete) and not self.action.num_actions) or not self.frame.nbytes:
            raise ValueError(f"there is nothing to choose or to learn from in {self.action} and {self.frame}")
        if self.picture_of_parts:
            rest = self.frame.nbytes - math.prod(self.picture_of_parts)
            if self.frame.dtype != "uint8" or rest < 0 or rest % 4:
                raise ValueError(
                    f"a frame {self.frame.dtype} {list(self.frame.shape)} does not hold the bytes of a picture "
                    f"{list(self.picture_of_parts)} and of float32 numbers"
                )
        if isinstance(self.action, Continuous) and self.has_action_mask:
            raise ValueError("has_action_mask needs choices, and the actions are continuous")
        if isinstance(self.action, Continuous | Mixed):
            with np.errstate(over="ignore", invalid="ignore"):
                bounded = np.isfinite(distance := self.action.high - self.action.low).all()
            if not bounded or (distance < 0).any():
                raise ValueError(f"actions {self.action.description} need finite bounds, low ones at most high ones")

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """Return the shape of one picture, [H, W] or [H, W, planes], of environments with `is_image`."""
        return self.picture_of_parts or self.frame.shape

    @property
    def vector_size(self) -> int:
        """Return the number of float32 numbers that each frame holds beside its picture."""
        return (self.frame.nbytes - math.prod(self.picture_of_parts)) // 4 if self.picture_of_parts else 0

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Return the shape of one observation, with its stack."""
        return (self.frame_stack, *self.frame.shape) if self.frame_stack else self.frame.shape

    @property
    def action_mask(self) -> ArraySpec | None:
        """Return shape and dtype of one environment's mask of legal actions; None if it has none."""
        if not self.has_action_mask or isinstance(self.action, Continuous):
            return None
        return ArraySpec((sum(self.action.choice_sizes),), "bool")


@dataclass(frozen=True)
class WindowSpec:
    """Steps t .. t + length that a learner samples together, and the positions of the stacked observations among them.

    Windows without a stride end with their episode: a position past its end means the episode's last step. A truncated
    episode bootstraps from the observation of that step.
    """

    length: int  # steps after the first
    observations: tuple[int, ...]  # positions in 0 .. length
    # 0: windows start at any step. Else they are sequences that start at multiples of it, the length of a chunk, and
    # cross episodes.
    stride: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for positions outside the window."""
        if not all(0 <= position <= self.length for position in self.observations):
            raise ValueError(f"positions {self.observations} of observations must be 0 to {self.length}, the length")

    @classmethod
    def transition(cls, n_step: int) -> "WindowSpec":
        """Return the window of an n-step transition: n steps, their first observation and the one to bootstrap from."""
        return cls(n_step, (0, n_step))

    @classmethod
    def unroll(cls, length: int) -> "WindowSpec":
        """Return the window of a whole chunk of `length` steps, with the observation to bootstrap from."""
        return cls(length, tuple(range(length + 1)), stride=length)

    def fits(self, window: Window) -> bool:
        """Return True if the window has this number of steps and observations."""
        return len(window.lasts) == self.length + 1 and len(window.observations) == len(self.observations)
