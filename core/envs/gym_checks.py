"""The border to environments that others wrote: everything they return is checked and converted here, one stream at a time."""

import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from core.common.foreign_code import foreign_code
from core.envs.pictures import Preprocessing
from core.specs import ArraySpec

OLD_API = ('the old gym API; return (observation, reward, terminated, truncated, info) from step and (observation, info) from '
           'reset, or register the class with gym 0.26 and set legacy="v21" (shimmy\'s adapter, pip install -e ".[legacy-gym]")')

SUCCESS = ("is_success", "success")  # in info, of gymnasium-robotics and others: whether the goal is reached now
MAX_REWARD = float(np.finfo(np.float32).max)
FAR = 1e6
_OWN_CODE = foreign_code("the environment")


def is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def frame_of(space: spaces.Space) -> ArraySpec:
    """How an observation is stored: pictures as bytes, everything else as one float32 vector, discrete values one-hot.

    Raises ValueError for a space without a fixed size.
    """
    if is_image(space):
        return ArraySpec(tuple(space.shape or ()), "uint8")
    if not space.is_np_flattenable:
        raise ValueError(f"observations of {space} have no fixed size and cannot be stored: choose or change them by a wrapper of "
                         "env.wrappers, as gymnasium.wrappers:FilterObservation or one of your own")
    if not (size := spaces.flatdim(space)):
        raise ValueError(f"observations of {space} are empty: there is nothing to learn from")
    return ArraySpec((size,), "float32")


def _reach(space: spaces.Box) -> np.ndarray:
    """Return how large observations of this space may be; infinite where a bound is.

    Many environments leave their Box a little, and training bears that. Numbers FAR times as large as its bounds make losses that are
    not finite, for which agent.lr would be blamed.
    """
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return FAR * np.maximum(np.maximum(np.abs(low), np.abs(high)), 1.0)


def flattened_pictures(space: spaces.Space) -> str:
    """Name the pictures in a space of several parts, which `frame_of` stores as numbers of one vector. Empty if there are none."""
    pictures = {".".join(path): part for path, part in _parts(space) if path and is_image(part)}
    if not pictures:
        return ""
    name, picture = next(iter(pictures.items()))
    return (f"{' and '.join(pictures)} of the observation {'is a picture' if len(pictures) == 1 else 'are pictures'}, and all parts become "
            f"one vector of {spaces.flatdim(space):,} numbers (those of {name} 0 to 255), which no convolution sees; to learn from the "
            "picture alone, make the environment with gymnasium.wrappers.TransformObservation(env, lambda seen: "
            f"seen[{name.split('.')[0]!r}], env.observation_space[{name.split('.')[0]!r}])")


def _parts(space: spaces.Space, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], spaces.Space]]:
    """Yield every space within a Dict or Tuple, and where it is."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for name, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from _parts(part, (*path, str(name)))
    else:
        yield path, space


class CheckedEnv(gym.Wrapper):
    """Raises ValueError naming field, value, stream and step for whatever is no observation, reward or flag.

    An action is taken `repeat` times, or until the episode ends; `max_steps` of them, repeated ones counted, cut it.
    Observations leave as `frame_of` says, byte vectors (RAM) scaled to 0 .. 1, and then as `preprocess` makes them.
    """

    def __init__(self, env: gym.Env, stream: int, max_steps: int | None, repeat: int, preprocess: Preprocessing):
        super().__init__(env)
        self.stream, self._max_steps, self._repeat = stream, max_steps, repeat
        self._frame, self._space = frame_of(env.observation_space), env.observation_space
        self._preprocess = preprocess
        if isinstance(self._space, spaces.Box):
            self._reach = _reach(self._space)
        low, high = (0, 255) if self._frame.dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, preprocess.frame.shape, np.dtype(self._frame.dtype).type)
        self._steps = self._total_steps = 0
        self.note = np.zeros(1)  # 1 + the stream while its own code runs, else 0
        self.success: bool | None = None  # what info said at the last step; None while it has never said anything

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._steps = 0
        try:
            result = self._own_code(self.env.reset, "reset", seed=seed, options=options)
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
        result = self._own_code(self.env.step, "step", action)
        if not isinstance(result, tuple) or len(result) != 5:
            returned = f"{len(result)} values" if isinstance(result, tuple) else reprlib.repr(result)
            raise ValueError(f"step of stream {self.stream} returned {returned} at step {self._total_steps}, expected 5 values: {OLD_API}")
        observation, reward, terminated, truncated, info = result
        self._note_success(info)
        cut = self._max_steps is not None and self._steps >= self._max_steps
        return (self._observation(observation), self._reward(reward), self._flag("terminated", terminated),
                self._flag("truncated", truncated) or cut)

    def _note_success(self, info: Any) -> None:
        said = [info[name] for name in SUCCESS if name in info] if isinstance(info, dict) else []
        if said and np.size(said[0]) == 1 and np.asarray(said[0]).dtype.kind in "biuf":
            self.success = bool(np.asarray(said[0]).item() > 0)
        elif self.success is not None:  # some say so only where it is true
            self.success = False

    def _own_code(self, function: Callable[..., Any], name: str, *arguments: Any, **keywords: Any) -> Any:
        """Says whose code runs: to a supervisor that waits for it, and in the error it raises."""
        self.note[0] = self.stream + 1
        try:
            with _OWN_CODE:
                result = function(*arguments, **keywords)
        except Exception as error:
            error.add_note(f"in {name} of stream {self.stream}, at its step {self._total_steps}")
            raise
        self.note[0] = 0
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
            raise self._fault("observation", array[element], f"finite values (element {element} of {array.size})")
        return array

    def _array(self, value: Any, space: spaces.Box) -> np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            raise self._fault("observation", value, f"an array {list(space.shape)}") from None
        bytes_only = space.dtype == np.uint8
        if array.shape != space.shape or (array.dtype != np.uint8 if bytes_only else array.dtype.kind not in "fiub"):
            raise self._fault("observation", value, f"{space.dtype} {list(space.shape)}")
        if self._frame.dtype == "uint8":
            return array
        outside = np.abs(array) > self._reach
        if outside.any():
            element = int(np.flatnonzero(outside)[0])
            raise self._fault("observation", array.flat[element],
                              f"a value near {space.low.flat[element]} .. {space.high.flat[element]} (element {element})")
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf, and is reported as such
            return array.reshape(-1).astype(np.float32) / np.float32(255 if bytes_only else 1)

    def _one_hot(self, value: Any, space: spaces.Discrete) -> np.ndarray:
        if not space.contains(value):
            raise self._fault("observation", value, f"a value of {space}")
        one_hot = np.zeros(self._frame.shape, np.float32)
        one_hot[int(value) - int(space.start)] = 1
        return one_hot

    def _flattened(self, value: Any) -> np.ndarray:
        try:
            array = np.asarray(spaces.flatten(self._space, value), np.float32)
        except Exception as error:  # whatever a foreign value does to gymnasium's flatten
            raise self._fault("observation", value, f"a value of {self._space} ({error})") from error
        if array.shape != self._frame.shape:
            raise self._fault("observation", value, f"a value of {self._space}")
        return array

    def _reward(self, value: Any) -> float:
        array = np.asarray(value) if not isinstance(value, list | tuple) else None
        if array is None or array.shape != () or array.dtype.kind not in "fiub" or not abs(float(array)) <= MAX_REWARD:
            raise self._fault("reward", value, "one finite number")
        return float(array)

    def _flag(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise self._fault(field, value, "a bool")
        return bool(value)

    def _fault(self, field: str, value: Any, expected: str) -> ValueError:
        shape = f" ({value.dtype} {list(value.shape)})" if isinstance(value, np.ndarray) else ""
        return ValueError(f"{field} of stream {self.stream} at step {self._total_steps} is {reprlib.repr(value)}{shape}, "
                          f"expected {expected}")
