"""Provide the environments of any gymnasium id, such as "CartPole-v1" or "my_package:MyEnv-v0".

Everything that an environment of another author returns is checked and converted, one environment at a time.
"""

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, iterate
from pydantic import Field, Strict

from core.common.foreign_code import foreign_code
from core.common.settings import JsonText, frozen_dataclass
from core.env import Clipping, Env, EnvParams, Size, clipped, env_seeds, grayscale, reset_timestep, resized
from core.envs.gym_make import MadeEnv, apply_wrappers, frame_rate, make_env
from core.envs.gym_spaces import ActionConverter, InvalidPartError, MaskReader, ObservationConverter
from core.specs import ArraySpec, Continuous, EnvSpec
from core.types import ACTION_MASK, TimeStep

OLD_API = (
    "the old gym API; return (observation, reward, terminated, truncated, info) from step and "
    '(observation, info) from reset, or register the class with gym 0.26 and set legacy="v21" '
    '(shimmy\'s adapter, pip install -e ".[legacy-gym]")'
)

SUCCESS_KEYS = ("is_success", "success")  # of info in gymnasium-robotics and others: the goal is reached now
MAX_REWARD = float(np.finfo(np.float32).max)
_FOREIGN_CODE = foreign_code("the environment")


@frozen_dataclass
class GymParams(EnvParams):
    max_steps: int | None = Field(default=None, ge=1, le=10**9)
    """Agent steps after which an episode is truncated; None is the limit of the id, in its own steps."""
    action_repeat: int = Field(default=1, ge=1, le=1_000)
    """Environment steps of an agent step, rewards added, unless the episode ends."""
    reward_clipping: Clipping = "none"
    """Clipping of rewards, in training only."""
    kwargs: JsonText = "{}"
    """Arguments for gymnasium.make as a JSON object; in a row of CONFIGS also a Python dictionary."""
    wrappers: JsonText = "[]"
    """Gymnasium wrappers as a JSON list, innermost first: "package.module:Wrapper" or [that, {its arguments}]."""
    resolution: Size | None = None
    """Height and width in pixels that pictures are resized to; None leaves them."""
    grayscale: bool = False
    """Turn colour pictures into grey ones."""
    max_byte: int = Field(default=255, ge=1, le=255)
    """Byte of pictures that networks read as 1; 255 is right for colours, less for symbols (MiniGrid: 10)."""
    frame_stack: int = Field(default=0, ge=0, le=64)
    """Agent steps seen together, each frame stored once; 0 is one observation without a stack axis."""
    observation_keys: Annotated[tuple[str | Annotated[int, Field(ge=0, le=10_000)], ...], Strict(False)] = ()
    """Parts of Dict and Tuple observations that are kept, by their path such as goal.position; empty keeps all."""
    action_mask: str | None = None
    """Source of the mask of legal actions: info (its entry action_mask), or the path of a part of Dict observations
    such as action_mask; None allows all actions."""
    legacy: Literal["none", "v26", "v21"] = "none"
    """Interface of an id of the old gym: v26 returns five values from step, v21 four."""


class GymEnv(Env):
    """E environments of one id in one thread.

    `num_threads` is ignored, because Python environments of one process share the interpreter. More actors do not.
    """

    Params = GymParams

    def __init__(
        self,
        params: GymParams,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        made = [self._make(params, game, render_mode) for _ in range(num_envs)]
        env = made[0].env
        convert = ObservationConverter(env.observation_space, params.observation_keys)
        self._convert_action, where = ActionConverter(env.action_space), params.action_mask
        self._action_spaces = batch_space(env.action_space, num_envs)
        read_mask = MaskReader(where, self._convert_action.spec, env.observation_space) if where else None
        if where and params.action_repeat > 1:
            raise ValueError(f"env.action_mask={where} needs env.action_repeat=1: a repeated action may become illegal")
        preprocess = Preprocessing(convert, params.resolution, params.grayscale)
        self.spec = EnvSpec(
            name=made[0].name,
            frame=preprocess.frame,
            frame_stack=params.frame_stack,
            action=self._convert_action.spec,
            frames_per_step=params.action_repeat,
            is_image=convert.is_image,
            max_value=float(params.max_byte) if convert.is_image else 1.0,
            reward_threshold=made[0].reward_threshold,
            frame_rate=frame_rate(env),
            warning="; ".join(filter(None, [convert.warning, "" if where else self._unread_mask(convert)])),
            parts=convert.parts,
            picture_of_parts=preprocess.picture_of_parts,
            has_action_mask=bool(where),
        )
        self._convert, self._preprocess = convert, preprocess
        repeat = params.action_repeat
        max_steps = params.max_steps * repeat if params.max_steps else made[0].max_steps
        self._envs = [
            CheckedEnv(each.env, env_ind, max_steps, repeat, convert, preprocess, read_mask)
            for env_ind, each in enumerate(made)
        ]
        self._num_envs = num_envs
        self._stack: np.ndarray  # [E, S, *frame.shape] of the last step, oldest frame first
        self._clipping = params.reward_clipping if training else "none"

    def reset(self, seed: int) -> TimeStep:
        seeds = env_seeds(seed, self._num_envs).tolist()
        observations = [env.reset(each) for env, each in zip(self._envs, seeds)]
        self._ended = np.zeros(self._num_envs, bool)
        return reset_timestep(self._stacked(np.stack(observations), ~self._ended), self._legal())

    def step(self, action: np.ndarray) -> TimeStep:
        """Take the actions. An environment whose episode has ended is reset in place of a step."""
        actions, first = self._convert_action(action, self._num_envs), self._ended
        steps = [
            (env.reset(), 0.0, False, False) if ended else env.step(action)
            for env, ended, action in zip(self._envs, first.tolist(), iterate(self._action_spaces, actions))
        ]
        observations, rewards, terminated, truncated = zip(*steps)
        self._ended = np.array(terminated) | np.array(truncated)
        raw_reward, discount = np.array(rewards, np.float32), 1 - np.array(terminated, np.float32)
        reward = clipped(raw_reward, self._clipping)
        observation = self._stacked(np.stack(observations), first)
        return TimeStep(observation, reward, discount, first, self._ended, raw_reward, self._legal())

    @staticmethod
    def _make(params: GymParams, game: str, render_mode: str | None) -> MadeEnv:
        """Make one environment, with the wrappers around the id's limit of an episode."""
        made = make_env(game, params.legacy, render_mode, params.kwargs)
        if params.wrappers == "[]":
            return made  # CheckedEnv applies the limit
        if params.max_steps is None and made.max_steps is not None:
            made = made._replace(env=gym.wrappers.TimeLimit(made.env, made.max_steps), max_steps=None)
        return made._replace(env=apply_wrappers(made.env, params.wrappers))

    @classmethod
    def gymnasium_env(cls, params: GymParams, game: str) -> gym.Env[Any, Any]:
        return make_env(game, params.legacy, None, params.kwargs).env.unwrapped

    def _unread_mask(self, convert: ObservationConverter) -> str:
        """Return a warning if a part of the observation seems to be a mask of legal actions, else an empty string."""
        names = [part.name for part in convert.parts if part.name.rpartition(".")[2] == ACTION_MASK]
        if not names or isinstance(self._convert_action.spec, Continuous):
            return ""
        return f"agents take illegal actions too, unless env.action_mask is {names[0]}"

    def from_gym(self, observation: Any) -> np.ndarray:
        """Return one observation of the gymnasium environment as the frame that a step stores."""
        try:
            return self._preprocess(self._convert(observation))
        except InvalidPartError as error:
            value = reprlib.repr(error.value)
            raise ValueError(f"{error.name or 'observation'} is {value}, expected {error.expected}") from error

    def to_gym(self, action: Any) -> Any:
        """Return one action of `spec` as the gymnasium environment takes it."""
        return next(iterate(self._action_spaces, self._convert_action(np.asarray(action)[None], 1)))

    def success(self, env_ind: int) -> bool | None:
        return self._envs[env_ind].success

    def render(self) -> np.ndarray:
        picture = self._envs[0].env.render()
        if not (isinstance(picture, np.ndarray) and picture.ndim == 3 and picture.shape[2] == 3):
            returned = list(picture.shape) if isinstance(picture, np.ndarray) else type(picture).__name__
            raise ValueError(f"{self.spec.name} draws no pictures: render() returned {returned}, expected [H, W, 3]")
        if picture.dtype != np.uint8:
            raise ValueError(f"{self.spec.name} draws pictures of {picture.dtype}, expected uint8")
        return picture

    def set_activity_marker(self, cell: np.ndarray, first: int = 0) -> None:
        for env_ind, env in enumerate(self._envs, first):
            env.activity_marker, env.env_ind = cell, env_ind

    def close(self) -> None:
        for env in self._envs:
            env.env.close()

    def _legal(self) -> np.ndarray | None:
        """Return the legal actions [E, A] of the last step."""
        return np.stack([env.legal for env in self._envs]) if self.spec.has_action_mask else None

    def _stacked(self, newest: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Return the newest frames [E, ...] stacked behind the previous ones, [E, S, ...].

        Previous frames are zeros where an episode starts.
        """
        if not self.spec.frame_stack:
            return newest
        previous = np.zeros((len(newest), self.spec.frame_stack - 1, *newest.shape[1:]), newest.dtype)
        if not first.all():
            previous[~first] = self._stack[~first, 1:]
        self._stack = np.concatenate([previous, newest[:, None]], 1)
        return self._stack


class Preprocessing:
    """A function from uint8 observations to frames: grayscale first, then resized, each if asked for.

    With a vector beside the picture, observations are pairs of both, and frames are the bytes of both.

    Args:
        convert: Makes the observations.
        size: New size; None keeps the size.
        to_gray: Convert to grayscale.

    Raises:
        ValueError: Preprocessing is asked for observations that are not pictures, or do not have one or three planes.
    """

    def __init__(self, convert: ObservationConverter, size: Size | None, to_gray: bool):
        observation = convert.frame
        self._size, self._to_gray, shape = size, to_gray, list(observation.shape)
        if not convert.is_image and (to_gray or size is not None):
            raise ValueError(
                f"env.resolution and env.grayscale are for pictures, and its observations are "
                f"{observation.dtype} {shape}"
            )
        if to_gray and len(shape) == 3 and shape[2] not in (1, 3):
            raise ValueError(f"env.grayscale is for pictures of three colours, and its have {shape[2]} planes")
        self.frame = ArraySpec(self._resized(np.zeros(shape, observation.dtype)).shape, observation.dtype)
        self.picture_of_parts: tuple[int, ...] = ()  # as in EnvSpec
        if convert.is_image and convert.vector_size:
            self.picture_of_parts = self.frame.shape
            self.frame = ArraySpec((self.frame.nbytes + 4 * convert.vector_size,), "uint8")

    def __call__(self, observation: Any) -> np.ndarray:
        if not self.picture_of_parts:
            return self._resized(observation)
        picture, vector = observation
        return np.concatenate([self._resized(picture).reshape(-1), vector.view(np.uint8)])

    def _resized(self, picture: np.ndarray) -> np.ndarray:
        picture = grayscale(picture) if self._to_gray else picture
        return picture if self._size is None else resized(picture, self._size)


class CheckedEnv:
    """An environment whose observations, rewards and flags are checked.

    An invalid value raises ValueError, which names field, value, environment and step.

    Args:
        env: The environment.
        env_ind: Its number in messages and in the activity marker.
        max_steps: Number of actions, repetitions counted, after which an episode is truncated.
        repeat: How often each action is taken, unless the episode ends.
        convert: Makes a picture, a vector or both of an observation.
        preprocess: Applied to what `convert` returns.
        read_mask: Reads the legal actions, which are then in `legal`. If None, all actions are.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        env_ind: int,
        max_steps: int | None,
        repeat: int,
        convert: ObservationConverter,
        preprocess: Preprocessing,
        read_mask: MaskReader | None = None,
    ):
        self.env, self.env_ind, self._max_steps, self._repeat = env, env_ind, max_steps, repeat
        self._convert, self._preprocess, self._read_mask = convert, preprocess, read_mask
        self.legal = np.ones(read_mask.size if read_mask else 0, bool)
        self._steps = self._total_steps = 0
        self.activity_marker = np.zeros(1)  # 1 + env_ind while the environment's code runs, else 0
        self.success: bool | None = None  # stated by info at the last step; None until info states a success

    def reset(self, seed: int | None = None) -> np.ndarray:
        self._steps = 0
        if seed is not None:  # an evaluation begins, which does not depend on those before
            self.success = None
        try:
            result = self._call(self.env.reset, "reset", seed=seed, options=None)
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                raise ValueError(f"reset of environment {self.env_ind}: {error}: {OLD_API}") from error
            raise
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise ValueError(f"reset of environment {self.env_ind} returned {reprlib.repr(result)}: {OLD_API}")
        self._update_mask(*result)
        return self._preprocess(self._observation(result[0]))

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated = self._step(action)
            total += reward
            if terminated or truncated:
                break
        return self._preprocess(observation), total, terminated, truncated

    def _step(self, action: Any) -> tuple[Any, float, bool, bool]:
        self._steps += 1
        self._total_steps += 1
        result = self._call(self.env.step, "step", action)
        if not isinstance(result, tuple) or len(result) != 5:
            returned = f"{len(result)} values" if isinstance(result, tuple) else reprlib.repr(result)
            raise ValueError(
                f"step of environment {self.env_ind} returned {returned} at step {self._total_steps}, "
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
            except InvalidPartError as error:
                raise self._error(error.name, error.value, error.expected) from None

    def _call(self, function: Callable[..., Any], name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the environment, and name it in the activity marker meanwhile and in a raised error."""
        self.activity_marker[0] = self.env_ind + 1
        try:
            with _FOREIGN_CODE:
                result = function(*arguments, **keywords)
        except Exception as error:
            error.add_note(f"in {name} of environment {self.env_ind}, at its step {self._total_steps}")
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
            f"{field} of environment {self.env_ind} at step {self._total_steps} is "
            f"{reprlib.repr(value)}{shape}, expected {expected}"
        )
