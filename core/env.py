"""The environment contract: always vectorised, next-step autoreset.

A step that ends an episode returns `last`. The step after it ignores its action, restarts that environment and returns
`first` with reward 0. Both kinds of end keep the true final observation: a termination sets `discount` to 0, a
truncation leaves it at 1.

The arrays of a time step hold until the next call of `step` or `recv`, which may reuse them.

Where `EnvSpec.has_action_mask` is set, each time step says which actions are legal at its observation. At least one is,
unless the episode has terminated.

Below the contract stand the functions that environments share: checks of their arguments, names of games, seeds of
their environments, the time step after a reset, clipped rewards, and grayscale pictures of another size.
"""

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, Strict

from core.common.settings import frozen_dataclass
from core.specs import Continuous, Discrete, EnvSpec, Mixed, MultiDiscrete
from core.types import TimeStep

Side = Annotated[int, Field(ge=8, le=1024)]  # pixels
Size = Side | Annotated[tuple[Side, Side], Strict(False)]  # one number, or height and width


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
            training: If False, rewards are not clipped, and losing a life leaves the discount at 1.
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

    @classmethod
    def human_normalized(cls, game: str, score: float) -> float | None:
        """Return (score - random) / (human - random); None if the class does not know these scores of the game."""
        return None

    def send(self, action: np.ndarray) -> None:
        """Start a step with these actions. Backends that can step in the background return before the step ends."""
        self._sent = action

    def recv(self) -> TimeStep:
        """Finish the step that `send` started and return its time step."""
        return self.step(self._sent)

    def success(self, env_ind: int) -> bool | None:
        """Return True if environment number `env_ind` calls its last episode a success; None if it does not say."""
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


def checked_discrete(action: np.ndarray, num_envs: int, space: Discrete | MultiDiscrete) -> np.ndarray:
    """Return the actions [E] or [E, choices] as int64.

    Raises:
        ValueError: An action is invalid; the message names its environment and value.
    """
    shape = (num_envs,) if isinstance(space, Discrete) else (num_envs, len(space.nvec))
    action = _checked_array(action, shape, "iu", "integers")
    limits = np.array(space.num_actions if isinstance(space, Discrete) else space.nvec)
    outside = (action < 0) | (action >= limits)
    if outside.any():
        env_ind, *element = np.argwhere(outside)[0].tolist()
        where = f" (element {element})" if element else ""
        largest = limits[tuple(element)] - 1
        raise ValueError(
            f"action {action[env_ind, *element]} of environment {env_ind}{where} is outside 0 .. {largest}"
        )
    return action.astype(np.int64, copy=False)


def checked_continuous(action: np.ndarray, num_envs: int, space: Continuous) -> np.ndarray:
    """Return the actions [E, ...] as float32. Raises ValueError that names environment and value of an invalid action.

    NaN is outside every interval.
    """
    action = _checked_array(action, (num_envs, *space.low.shape), "fiu", "float32").astype(np.float32, copy=False)
    inside = (action >= space.low) & (action <= space.high)
    if not inside.all():
        env_ind, *element = np.argwhere(~inside)[0].tolist()
        value, low, high = (array[tuple(element)] for array in (action[env_ind], space.low, space.high))
        raise ValueError(f"action {value} of environment {env_ind} (element {element}) is outside {low} .. {high}")
    return action


def checked_mixed(action: np.ndarray, num_envs: int, space: Mixed) -> tuple[np.ndarray, np.ndarray]:
    """Return the choices [E, choices] as int64 and the numbers [E, numbers] as float32.

    Raises:
        ValueError: An action is invalid; the message names its environment and value.
    """
    action = _checked_array(action, (num_envs, *space.array.shape), "fiu", "float32")
    choices, numbers = np.split(action, [len(space.nvec)], 1)
    fractional = ~(np.trunc(choices) == choices)  # also of NaN
    if fractional.any():
        env_ind, element = np.argwhere(fractional)[0].tolist()
        raise ValueError(
            f"choice {choices[env_ind, element]} of environment {env_ind} (element [{element}]) is no integer"
        )
    whole = checked_discrete(np.clip(choices, -1, 2**62).astype(np.int64), num_envs, MultiDiscrete(space.nvec))
    return whole, checked_continuous(numbers, num_envs, space.continuous)


def _checked_array(action: np.ndarray, shape: tuple[int, ...], kinds: str, expected: str) -> np.ndarray:
    action = np.asarray(action)
    if action.shape != shape or action.dtype.kind not in kinds:
        raise ValueError(f"actions are {action.dtype} {list(action.shape)}, expected {expected} {list(shape)}")
    return action


def env_seeds(seed: int, num_envs: int) -> np.ndarray:
    """Return a seed [E] in 0 .. 2**31 - 1 for each environment; neighbouring values of `seed` give distant seeds."""
    first = int(np.random.SeedSequence(seed).generate_state(1)[0]) % (2**31 - num_envs)
    return first + np.arange(num_envs)


def reset_timestep(observation: np.ndarray, legal: np.ndarray | None = None) -> TimeStep:
    """Return the time step of E environments that have been reset: reward 0, discount 1, `first` True and `last` False.

    Args:
        observation: [E, ...].
        legal: [E, A] bool, the legal actions; None if the environment has no masks.
    """
    zeros = np.zeros(len(observation), np.float32)
    first = np.ones(len(observation), bool)
    return TimeStep(observation, zeros, zeros + 1, first, ~first, zeros, legal)


def normalized_name(name: str) -> str:
    """Return the name in lower case without namespace, suffix, spaces, hyphens and underscores.

    `Pong`, `PongNoFrameskip-v4` and `ALE/Pong-v5` all are "pong": frameskip, sticky actions and the action set, which
    gymnasium encodes in suffixes, are set by options only.
    """
    name = re.sub(r"^(ALE|MinAtar)/", "", name, flags=re.IGNORECASE)
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[\s_-]", "", name).lower()


def resolve_name(name: str, known: Iterable[str]) -> str:
    """Return the canonical name among `known`. Raises ValueError with the closest names."""
    canonical_names = {normalized_name(canonical): canonical for canonical in known}
    key = normalized_name(name)
    if key in canonical_names:
        return canonical_names[key]
    close = [canonical_names[other] for other in difflib.get_close_matches(key, canonical_names, n=3, cutoff=0.5)]
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(sorted(canonical_names.values()))}"
    raise ValueError(f"unknown game {name!r}; {hint}")


# rewards and pictures -------------------------------------------------------------------------------------------------
def soft_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 5 * (0.3 * min(tanh(r / 5), 0) + max(tanh(r / 5), 0)), the clipping of IMPALA's code (scalable_agent).

    The paper's own formula is `optimistic_asymmetric`, which saturates at rewards of about 2 instead of about 10.
    """
    bounded = np.tanh(reward / 5.0)
    return 5.0 * np.where(reward < 0, 0.3 * bounded, bounded)


def optimistic_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 0.3 * min(tanh(r), 0) + 5 * max(tanh(r), 0), IMPALA's asymmetric clipping (1802.01561, figure D.1)."""
    bounded = np.tanh(reward)
    return np.asarray(0.3 * np.minimum(bounded, 0.0) + 5.0 * np.maximum(bounded, 0.0))


Clipping = Literal["none", "sign", "clamp", "soft_asymmetric", "optimistic_asymmetric"]

CLIPPINGS: dict[Clipping, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda reward: reward,
    "sign": np.sign,  # DQN (Nature 2015): positive rewards are 1, negative ones -1
    "clamp": lambda reward: np.clip(reward, -1, 1),  # keeps fractions
    "soft_asymmetric": soft_asymmetric,  # IMPALA's published code
    "optimistic_asymmetric": optimistic_asymmetric,  # IMPALA's figure D.1
}


def clipped(reward: np.ndarray, clipping: Clipping) -> np.ndarray:
    """Return a new float32 array of the rewards [E], clipped by an entry of CLIPPINGS."""
    return CLIPPINGS[clipping](reward).astype(np.float32)


def height_and_width(size: Size) -> tuple[int, int]:
    """Return a size as (height, width)."""
    return (size, size) if isinstance(size, int) else size


def resized(picture: np.ndarray, size: Size) -> np.ndarray:
    """Resize a picture [H, W] or [H, W, planes]; each new pixel is the mean of the area that it covers."""
    import cv2  # takes long to import, and most environments need none of it

    height, width = height_and_width(size)
    # cv2 resizes at most four planes at a time
    parts = [picture] if picture.ndim == 2 else np.split(picture, range(4, picture.shape[2], 4), 2)
    smaller = [
        cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, *part.shape[2:])
        for part in parts
    ]
    return smaller[0] if len(smaller) == 1 else np.concatenate(smaller, 2)


def grayscale(picture: np.ndarray) -> np.ndarray:
    """Return the brightness [H, W] of a picture [H, W, 3]; a picture of one plane keeps its values."""
    import cv2

    if picture.ndim == 3 and picture.shape[2] == 3:
        return cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return picture.reshape(picture.shape[:2])
