"""Check and convert everything that a gymnasium environment of another author returns, one stream at a time."""

import reprlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from core.common.foreign_code import foreign_code
from core.envs.mask_reader import InvalidMaskError, MaskReader
from core.envs.observation_parts import InvalidPartError, ObservationConverter
from core.envs.preprocessing import JoinedFrames, Preprocessing

OLD_API = (
    "the old gym API; return (observation, reward, terminated, truncated, info) from step and "
    '(observation, info) from reset, or register the class with gym 0.26 and set legacy="v21" '
    '(shimmy\'s adapter, pip install -e ".[legacy-gym]")'
)

SUCCESS_KEYS = ("is_success", "success")  # of info in gymnasium-robotics and others: the goal is reached now
MAX_REWARD = float(np.finfo(np.float32).max)
_FOREIGN_CODE = foreign_code("the environment")


class CheckedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose observations, rewards and flags are checked.

    An invalid value raises ValueError, which names field, value, stream and step.

    Args:
        env: The environment.
        stream: Its number in messages and in the activity marker.
        max_steps: Number of actions, repetitions counted, after which an episode is truncated.
        repeat: How often each action is taken, unless the episode ends.
        convert: Makes a picture, a vector or both of an observation.
        preprocess: Applied to what `convert` returns.
        read_mask: Reads the legal actions, which are then in `legal`. If None, all actions are.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        stream: int,
        max_steps: int | None,
        repeat: int,
        convert: ObservationConverter,
        preprocess: Preprocessing | JoinedFrames,
        read_mask: MaskReader | None = None,
    ):
        super().__init__(env)
        self.stream, self._max_steps, self._repeat = stream, max_steps, repeat
        self._convert, self._preprocess, self._read_mask = convert, preprocess, read_mask
        self.legal = np.ones(read_mask.size if read_mask else 0, bool)
        low, high = (0, 255) if preprocess.frame.dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, preprocess.frame.shape, np.dtype(preprocess.frame.dtype).type)
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
        self._update_mask(*result)
        return self._preprocess(self._observation(result[0])), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated = self._step(action)
            total += reward
            if terminated or truncated:
                break
        return self._preprocess(observation), total, terminated, truncated, {}

    def _step(self, action: Any) -> tuple[Any, float, bool, bool]:
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
        if not terminated:
            self._update_mask(observation, info)
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

    def _update_mask(self, observation: Any, info: Any) -> None:
        if self._read_mask:
            try:
                self.legal = self._read_mask(observation, info)
            except InvalidMaskError as error:
                raise self._error("action_mask", error.args[0], f"{self._read_mask.size} zeros and ones") from None

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

    def _observation(self, value: Any) -> Any:
        try:
            return self._convert(value)
        except InvalidPartError as error:
            field = error.name if error.name == "observation" else f"observation {error.name}"
            raise self._error(field, error.value, error.expected) from error.__cause__

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
