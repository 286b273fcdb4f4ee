"""Provide the environments of any gymnasium id, such as "CartPole-v1" or "my_package:MyEnv-v0"."""

from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
from pydantic import Field, Strict

from core.common.settings import JsonText, frozen_dataclass
from core.env import Env, EnvParams
from core.envs.action_parts import ActionConverter
from core.envs.argument_checks import check_construction, reset_timestep, stream_seeds
from core.envs.gym_checks import CheckedEnv
from core.envs.gym_make import frame_rate, make_env
from core.envs.mask_reader import MaskReader
from core.envs.observation_parts import ObservationConverter
from core.envs.preprocessing import Clipping, JoinedFrames, Preprocessing, Size, clipped
from core.specs import EnvSpec
from core.types import TimeStep


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
        check_construction(num_envs, num_threads, render_mode)
        made = [make_env(game, params.legacy, render_mode, params.kwargs, params.wrappers) for _ in range(num_envs)]
        env = made[0].env
        convert = ObservationConverter(env.observation_space, params.observation_keys)
        self._convert_action, where = ActionConverter(env.action_space), params.action_mask
        read_mask = MaskReader(where, self._convert_action.spec, env.observation_space) if where else None
        if where and params.action_repeat > 1:
            raise ValueError(f"env.action_mask={where} needs env.action_repeat=1: a repeated action may become illegal")
        image = convert.is_image
        preprocess = Preprocessing(convert.frame, image, params.resolution, params.grayscale)
        beside = image and convert.vector_size > 0
        frames = JoinedFrames(preprocess, convert.vector_size) if beside else preprocess
        self.spec = EnvSpec(
            name=made[0].name,
            frame=frames.frame,
            frame_stack=params.frame_stack,
            action=self._convert_action.spec,
            frames_per_step=params.action_repeat,
            is_image=image,
            max_value=float(params.max_byte) if image else 1.0,
            reward_threshold=made[0].reward_threshold,
            frame_rate=frame_rate(env),
            warning=convert.warning,
            parts=convert.parts,
            picture_of_parts=preprocess.frame.shape if beside else (),
            has_action_mask=bool(where),
        )
        repeat = params.action_repeat
        max_steps = params.max_steps * repeat if params.max_steps else made[0].max_steps
        self._streams = [
            CheckedEnv(each.env, stream, max_steps, repeat, convert, frames, read_mask)
            for stream, each in enumerate(made)
        ]
        self._num_envs, self._render_mode = num_envs, render_mode
        self._stack: np.ndarray  # [E, S, *frame.shape] of the last step, oldest frame first
        self._clipping = params.reward_clipping if training else "none"
        if render_mode is not None:
            self._try_render()

    def reset(self, seed: int) -> TimeStep:
        seeds = stream_seeds(seed, self._num_envs).tolist()
        observations = [stream.reset(seed=each)[0] for stream, each in zip(self._streams, seeds)]
        self._ended = np.zeros(self._num_envs, bool)
        return reset_timestep(self._stacked(np.stack(observations), ~self._ended), self._legal())

    def step(self, action: np.ndarray) -> TimeStep:
        """Take the actions. An environment whose episode has ended is reset in place of a step."""
        actions, first = self._convert_action(action, self._num_envs), self._ended
        steps = [
            (stream.reset()[0], 0.0, False, False) if ended else stream.step(_action_of(actions, index))[:4]
            for index, (stream, ended) in enumerate(zip(self._streams, first.tolist()))
        ]
        observations, rewards, terminated, truncated = zip(*steps)
        self._ended = np.array(terminated) | np.array(truncated)
        raw_reward, discount = np.array(rewards, np.float32), 1 - np.array(terminated, np.float32)
        reward = clipped(raw_reward, self._clipping)
        observation = self._stacked(np.stack(observations), first)
        return TimeStep(observation, reward, discount, first, self._ended, raw_reward, self._legal())

    @classmethod
    def gymnasium_env(cls, params: GymParams, game: str) -> gym.Env[Any, Any]:
        return make_env(game, params.legacy, None, params.kwargs).env.unwrapped

    def success(self, stream: int) -> bool | None:
        return self._streams[stream].success

    def render(self) -> np.ndarray:
        if self._render_mode != "rgb_array":
            return super().render()
        picture = self._streams[0].render()
        assert isinstance(picture, np.ndarray)  # `_try_render` checked that at the construction
        return picture

    def set_activity_marker(self, cell: np.ndarray, first: int = 0) -> None:
        for stream, env in enumerate(self._streams, first):
            env.activity_marker, env.stream = cell, stream

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _legal(self) -> np.ndarray | None:
        """Return the legal actions [E, A] of the last step."""
        return np.stack([stream.legal for stream in self._streams]) if self.spec.has_action_mask else None

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

    def _try_render(self) -> None:
        """Render once, so that a missing package for drawing is an error of the construction."""
        try:
            self._streams[0].reset(seed=0)
            picture = self._streams[0].render()
        except gym.error.DependencyNotInstalled as error:
            raise ImportError(f"{self.spec.name}: {error}") from error
        if self._render_mode == "rgb_array" and not (isinstance(picture, np.ndarray) and picture.ndim == 3):
            raise ValueError(f"{self.spec.name} draws no pictures: render() returned {type(picture).__name__}")


def _action_of(actions: Any, index: int) -> Any:
    """Return one environment's action from those of all environments, as `ActionConverter` returns them."""
    if isinstance(actions, dict):
        return {name: _action_of(part, index) for name, part in actions.items()}
    return tuple(_action_of(part, index) for part in actions) if isinstance(actions, tuple) else actions[index]
