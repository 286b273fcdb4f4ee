"""Check and convert everything that a gymnasium environment of another author returns, one stream at a time."""

import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from core.common.foreign_code import foreign_code
from core.envs.pictures import Preprocessing
from core.specs import ArraySpec

OLD_API = (
    "the old gym API; return (observation, reward, terminated, truncated, info) from step and "
    '(observation, info) from reset, or register the class with gym 0.26 and set legacy="v21" '
    '(shimmy\'s adapter, pip install -e ".[legacy-gym]")'
)

SUCCESS_KEYS = ("is_success", "success")  # of info in gymnasium-robotics and others: the goal is reached now
MAX_REWARD = float(np.finfo(np.float32).max)
TOLERANCE = 1e6  # factor by which an observation may exceed the bounds of its space
_FOREIGN_CODE = foreign_code("the environment")


def is_image(space: spaces.Space[Any]) -> bool:
    """Return True if the space is uint8 pictures, [H, W] or [H, W, planes]."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def frame_of(space: spaces.Space[Any]) -> ArraySpec:
    """Return the shape and dtype in which observations are stored.

    Pictures are stored as bytes, everything else as one float32 vector, in which discrete values are one-hot. Raises
    ValueError for a space that has no fixed size or is empty.
    """
    if is_image(space):
        return ArraySpec(tuple(space.shape or ()), "uint8")
    if not space.is_np_flattenable:
        raise ValueError(
            f"observations of {space} have no fixed size and cannot be stored: choose or change them by "
            "a wrapper of env.wrappers, as gymnasium.wrappers:FilterObservation or one of your own"
        )
    if not (size := spaces.flatdim(space)):
        raise ValueError(f"observations of {space} are empty: there is nothing to learn from")
    return ArraySpec((size,), "float32")


def _max_magnitude(space: spaces.Box) -> np.ndarray:
    """Return the largest absolute value of each element that is accepted; infinite where a bound is.

    Many environments leave their Box a little, which does no harm. Values of TOLERANCE times the bounds would make
    losses that are not finite, for which agent.learning_rate would be blamed.
    """
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return TOLERANCE * np.maximum(np.maximum(np.abs(low), np.abs(high)), 1.0)


def flattened_pictures(space: spaces.Space[Any]) -> str:
    """Return a warning if `frame_of` flattens the pictures of a composite space into one vector, else ""."""
    pictures = {".".join(path): part for path, part in _parts(space) if path and is_image(part)}
    if not pictures:
        return ""
    name = next(iter(pictures))
    are, key = "is a picture" if len(pictures) == 1 else "are pictures", name.split(".")[0]
    return (
        f"{' and '.join(pictures)} of the observation {are}, and all parts become one vector of "
        f"{spaces.flatdim(space):,} numbers (those of {name} 0 to 255), which no convolution sees; to learn from "
        "the picture alone, make the environment with gymnasium.wrappers.TransformObservation(env, "
        f"lambda seen: seen[{key!r}], env.observation_space[{key!r}])"
    )


def _parts(space: spaces.Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    """Yield the path and the space of every leaf of nested Dict and Tuple spaces."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for name, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from _parts(part, (*path, str(name)))
    else:
        yield path, space


class CheckedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose observations, rewards and flags are checked.

    An invalid value raises ValueError, which names field, value, stream and step.

    Observations are returned as `frame_of` says, with byte vectors (RAM) scaled to 0 .. 1, and then preprocessed.

    Args:
        env: The environment.
        stream: Its number in messages and in the activity marker.
        max_steps: Number of actions, repetitions counted, after which an episode is truncated.
        repeat: How often each action is taken, unless the episode ends.
        preprocess: Applied to observations.
    """

    def __init__(
        self, env: gym.Env[Any, Any], stream: int, max_steps: int | None, repeat: int, preprocess: Preprocessing
    ):
        super().__init__(env)
        self.stream, self._max_steps, self._repeat = stream, max_steps, repeat
        self._frame, self._space = frame_of(env.observation_space), env.observation_space
        self._preprocess = preprocess
        if isinstance(self._space, spaces.Box):
            self._max_magnitude = _max_magnitude(self._space)
        low, high = (0, 255) if self._frame.dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, preprocess.frame.shape, np.dtype(self._frame.dtype).type)
        self._steps = self._total_steps = 0
        self.activity_marker = np.zeros(1)  # 1 + the stream while the environment's code runs, else 0
        self.success: bool | None = None  # stated by info at the last step; None until info states a success

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self._steps = 0
        try:
            result = self._call(self.env.reset, "reset", seed=seed, options=options)
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                raise ValueError(f"reset of stream {self.stream}: {error}: {OLD_API}") from error
            raise
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise ValueError(f"reset of stream {self.stream} returned {reprlib.repr(result)}: {OLD_API}")
        return self._preprocess(self._observation(result[0])), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated = self._step(action)
            total += reward
            if terminated or truncated:
                break
        return self._preprocess(observation), total, terminated, truncated, {}

    def _step(self, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        self._steps += 1
        self._total_steps += 1
        result = self._call(self.env.step, "step", action)
        if not isinstance(result, tuple) or len(result) != 5:
            returned = f"{len(result)} values" if isinstance(result, tuple) else reprlib.repr(result)
            raise ValueError(
                f"step of stream {self.stream} returned {returned} at step {self._total_steps}, "
                f"expected 5 values: {OLD_API}"
            )
        observation, reward, terminated, truncated, info = result
        self._update_success(info)
        cut = self._max_steps is not None and self._steps >= self._max_steps
        return (
            self._observation(observation),
            self._reward(reward),
            self._flag("terminated", terminated),
            self._flag("truncated", truncated) or cut,
        )

    def _update_success(self, info: Any) -> None:
        key = next((key for key in SUCCESS_KEYS if key in info), None) if isinstance(info, dict) else None
        value = None if key is None else np.asarray(info[key])
        if value is not None and value.size == 1 and value.dtype.kind in "biuf":
            self.success = bool(value.item() > 0)
        elif self.success is not None:  # some environments have the key only if it is true
            self.success = False

    def _call(self, function: Callable[..., Any], name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the environment, and name the stream in the activity marker meanwhile and in a raised error."""
        self.activity_marker[0] = self.stream + 1
        try:
            with _FOREIGN_CODE:
                result = function(*arguments, **keywords)
        except Exception as error:
            error.add_note(f"in {name} of stream {self.stream}, at its step {self._total_steps}")
            raise
        self.activity_marker[0] = 0
        return result

    def _observation(self, value: Any) -> np.ndarray:
        if isinstance(self._space, spaces.Box):
            array = self._array(value, self._space)
        elif isinstance(self._space, spaces.Discrete):
            array = self._one_hot(value, self._space)
        else:
            array = self._flattened(value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            element = int(np.flatnonzero(~np.isfinite(array))[0])
            raise self._error("observation", array[element], f"finite values (element {element} of {array.size})")
        return array

    def _array(self, value: Any, space: spaces.Box) -> np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError:  # nested lists of different lengths
            raise self._error("observation", value, f"an array {list(space.shape)}") from None
        bytes_only = space.dtype == np.uint8
        if array.shape != space.shape or (array.dtype != np.uint8 if bytes_only else array.dtype.kind not in "fiub"):
            raise self._error("observation", value, f"{space.dtype} {list(space.shape)}")
        if self._frame.dtype == "uint8":
            return array
        outside = np.abs(array) > self._max_magnitude
        if outside.any():
            element = int(np.flatnonzero(outside)[0])
            low, high = space.low.flat[element], space.high.flat[element]
            raise self._error("observation", array.flat[element], f"a value near {low} .. {high} (element {element})")
        with np.errstate(over="ignore"):  # values too large for float32 become inf, which `_observation` reports
            return array.reshape(-1).astype(np.float32) / np.float32(255 if bytes_only else 1)

    def _one_hot(self, value: Any, space: spaces.Discrete) -> np.ndarray:
        if not space.contains(value):
            raise self._error("observation", value, f"a value of {space}")
        one_hot = np.zeros(self._frame.shape, np.float32)
        one_hot[int(value) - int(space.start)] = 1
        return one_hot

    def _flattened(self, value: Any) -> np.ndarray:
        try:
            array = np.asarray(spaces.flatten(self._space, value), np.float32)
        except Exception as error:  # flatten can raise anything for a value that is not of the space
            raise self._error("observation", value, f"a value of {self._space} ({error})") from error
        if array.shape != self._frame.shape:
            raise self._error("observation", value, f"a value of {self._space}")
        return array

    def _reward(self, value: Any) -> float:
        array = np.asarray(value) if not isinstance(value, list | tuple) else None
        if array is None or array.shape != () or array.dtype.kind not in "fiub" or not abs(float(array)) <= MAX_REWARD:
            raise self._error("reward", value, "one finite number")
        return float(array)

    def _flag(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise self._error(field, value, "a bool")
        return bool(value)

    def _error(self, field: str, value: Any, expected: str) -> ValueError:
        shape = f" ({value.dtype} {list(value.shape)})" if isinstance(value, np.ndarray) else ""
        return ValueError(
            f"{field} of stream {self.stream} at step {self._total_steps} is "
            f"{reprlib.repr(value)}{shape}, expected {expected}"
        )
