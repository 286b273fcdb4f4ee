"""The environment contract: always vectorised, next-step autoreset.

A step that ends an episode returns `last`; the step after it ignores its action, restarts that stream and returns `first` with
reward 0. Both kinds of end keep the true final observation; a termination sets `discount` 0, a truncation leaves it 1.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from core.common.settings import frozen_dataclass
from core.specs import EnvSpec
from core.types import TimeStep


@frozen_dataclass
class EnvParams:
    """Options of every environment. `Env.Params` of each environment is a subclass."""


class Env(ABC):
    """E environments stepped together. Constructing it must be cheap; nothing is shared between instances.

    Raises ValueError for an unknown game (with the closest names) and ImportError (with the pip command) for a missing package.
    """

    Params: ClassVar[type[EnvParams]] = EnvParams
    spec: EnvSpec

    @abstractmethod
    def __init__(self, params: Any, game: str, num_envs: int, *, training: bool = True, num_threads: int = 1,
                 render_mode: str | None = None):
        """`training` False: raw rewards, no life-loss discounts. `render_mode` "human" or "rgb_array": one stream only."""

    @abstractmethod
    def reset(self, seed: int) -> TimeStep:
        """Start all streams; stream e is seeded from (seed, e), distinct for each. reward 0, discount 1, first True."""

    @abstractmethod
    def step(self, action: np.ndarray) -> TimeStep:
        """Take action [E, ...] in every stream. Raises ValueError naming stream and value for an action outside the space."""

    @classmethod
    def gymnasium_env(cls, params: Any, game: str) -> Any:
        """One gymnasium.Env as its author wrote it, for gymnasium's own checker; None where there is none behind this class."""
        return None

    def send(self, action: np.ndarray) -> None:
        """The first half of `step`; where the backend can, its emulators begin and this returns. `recv` must follow."""
        self._sent = action

    def recv(self) -> TimeStep:
        """The other half: what `step` of the action that was sent returns."""
        return self.step(self._sent)

    def success(self, stream: int) -> bool | None:
        """Return whether the environment itself calls the episode that this stream has just ended a success; None if it does not say."""
        return None

    def render(self) -> np.ndarray:
        """The colour picture [H, W, 3] uint8 of stream 0; only with render_mode "rgb_array"."""
        raise NotImplementedError(f"{type(self).__name__} draws no pictures")

    def set_activity_marker(self, cell: np.ndarray, first: int = 0) -> None:
        """Environments that call foreign code write 1 + its stream into cell [1] while it runs, and 0 after: a hang can then be named.

        The first of these streams is the actor's stream `first`: so they are numbered in the cell and in errors.
        """

    def close(self) -> None:
        """Release threads and windows; further calls are errors."""
