"""The environment contract: always vectorised, next-step autoreset.

A step that ends an episode returns `last`. The step after it ignores its action, restarts that environment and returns
`first` with reward 0. Both kinds of end keep the true final observation: a termination sets `discount` to 0, a
truncation leaves it at 1.

Where `EnvSpec.has_action_mask` is set, each time step says which actions are legal at its observation. At least one is,
unless the episode has terminated.
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
    """E environments that are stepped together.

    Constructing one must be cheap, and instances must share nothing.

    Raises:
        ValueError: The game is unknown; the message names the closest games.
        ImportError: A package is missing; the message has the pip command.
    """

    Params: ClassVar[type[EnvParams]] = EnvParams
    spec: EnvSpec

    @abstractmethod
    def __init__(
        self,
        params: Any,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        """Construct the environments.

        Args:
            params: Settings of this class, an instance of `Params`.
            game: Name of the game, as a config gives it.
            num_envs: Number E of environments.
            training: If False, rewards are raw and a lost life has no discount.
            num_threads: CPU threads that stepping may use.
            render_mode: "human", "rgb_array" or None. Rendering allows one environment only.
        """

    @abstractmethod
    def reset(self, seed: int) -> TimeStep:
        """Start all environments.

        Environment e is seeded from (seed, e), so that all differ. The time step has reward 0, discount 1 and `first`
        True.
        """

    @abstractmethod
    def step(self, action: np.ndarray) -> TimeStep:
        """Take the actions [E, ...].

        Raises:
            ValueError: An action is outside the space; the message names the environment and the value.
        """

    @classmethod
    def gymnasium_env(cls, params: Any, game: str) -> Any:
        """Return one gymnasium.Env as its author wrote it, for gymnasium's checker; None if the class wraps none."""
        return None

    def send(self, action: np.ndarray) -> None:
        """Start a step with these actions. Backends that can step in the background return before the step ends."""
        self._sent = action

    def recv(self) -> TimeStep:
        """Finish the step that `send` started and return its time step."""
        return self.step(self._sent)

    def success(self, stream: int) -> bool | None:
        """Return True if environment number `stream` calls its last episode a success; None if it does not say."""
        return None

    def render(self) -> np.ndarray:
        """Return the colour image [H, W, 3] uint8 of environment 0. Only render_mode "rgb_array" allows it."""
        raise NotImplementedError(f"{type(self).__name__} cannot render images")

    def set_activity_marker(self, cell: np.ndarray, first: int = 0) -> None:
        """Make foreign code leave a mark while it runs, so that the supervisor can name an environment that hangs.

        Args:
            cell: [1] array. It holds 1 + the number of the environment whose foreign code runs, else 0.
            first: Number of environment 0 among all environments of the actor, which the cell and errors count from.
        """

    def close(self) -> None:
        """Release threads and windows. Further calls are errors."""
