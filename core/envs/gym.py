"""Any gymnasium id ("CartPole-v1", "HalfCheetah-v5", "my_package:MyEnv-v0"), discrete or continuous, E of them in one thread."""

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from core.env import Continuous, Discrete, Env, EnvSpec, TimeStep
from core.envs.checks import check_construction, checked_continuous, checked_discrete, stream_seeds
from core.envs.gym_checks import CheckedEnv, flattened_pictures, frame_of, is_image
from core.envs.gym_make import LEGACY_VERSIONS, make
from core.envs.rewards import CLIPPINGS, clipped
from core.settings import setting


@dataclass(frozen=True)
class GymParams:
    max_steps: int | None = setting(None, low=1)  # agent steps an episode, then truncated; None: the limit of the id, in its own steps
    action_repeat: int = setting(1, low=1)  # steps of the environment that an agent step takes, rewards added, unless the episode ends
    reward_clipping: str = setting("none", choices=tuple(CLIPPINGS))  # in training only
    legacy: str = setting("none", choices=LEGACY_VERSIONS)  # an id of the old gym: v26 returns five values from step, v21 four


class GymEnv(Env):
    """E environments of one id. `num_threads` is not used: python environments share the interpreter, more actors do not."""

    Params = GymParams

    def __init__(self, params: GymParams, game: str, num_envs: int, *, training: bool = True, num_threads: int = 1,
                 render_mode: str | None = None):
        check_construction(params, num_envs, num_threads, render_mode)
        made = [make(game, params.legacy, render_mode) for _ in range(num_envs)]
        env = made[0].env
        self._action, self._action_space = _action(env.action_space), env.action_space
        self.spec = EnvSpec(name=made[0].name, frame=frame_of(env.observation_space), frame_stack=0,
                            action=self._action, frames_per_step=params.action_repeat, is_image=is_image(env.observation_space),
                            max_value=255.0 if is_image(env.observation_space) else 1.0, warning=flattened_pictures(env.observation_space))
        repeat = params.action_repeat
        limits = [params.max_steps * repeat if params.max_steps else one.max_steps for one in made]
        self._streams = [CheckedEnv(one.env, stream, limit, repeat) for stream, (one, limit) in enumerate(zip(made, limits))]
        self._vector = SyncVectorEnv([_giver(env) for env in self._streams], autoreset_mode=AutoresetMode.NEXT_STEP)
        self._num_envs, self._render_mode = num_envs, render_mode
        self._clipping = params.reward_clipping if training else "none"
        if render_mode is not None:
            self._try_to_draw()

    def reset(self, seed: int) -> TimeStep:
        observation, _ = self._vector.reset(seed=stream_seeds(seed, self._num_envs).tolist())
        self._ended = np.zeros(self._num_envs, bool)
        zeros, ones = np.zeros(self._num_envs, np.float32), np.ones(self._num_envs, np.float32)
        return TimeStep(observation, zeros, ones, ones.astype(bool), self._ended, zeros)

    def step(self, action: np.ndarray) -> TimeStep:
        observation, reward, terminated, truncated, _ = self._vector.step(self._checked(action))
        first, self._ended = self._ended, terminated | truncated
        raw_reward, discount = reward.astype(np.float32), 1.0 - terminated.astype(np.float32)
        return TimeStep(observation, clipped(raw_reward, self._clipping), discount, first, self._ended, raw_reward)

    @classmethod
    def gymnasium_env(cls, params: GymParams, game: str) -> gym.Env:
        return make(game, params.legacy, None).env.unwrapped

    def render(self) -> np.ndarray:
        if self._render_mode != "rgb_array":
            return super().render()
        picture = self._vector.envs[0].render()
        assert isinstance(picture, np.ndarray)  # tried when this was made
        return picture

    def note_stream_in(self, cell: np.ndarray, first: int = 0) -> None:
        for number, env in enumerate(self._streams, first):
            env.note, env.stream = cell, number

    def close(self) -> None:
        self._vector.close()

    def _checked(self, action: np.ndarray) -> np.ndarray:
        space = self._action_space
        if isinstance(self._action, Discrete):
            assert isinstance(space, spaces.Discrete)
            return checked_discrete(action, self._num_envs, self._action) + space.start
        assert isinstance(space, spaces.Box)
        action = checked_continuous(action, self._num_envs, self._action)
        return np.clip(action.astype(space.dtype), space.low, space.high)  # float32 bounds may round outside of float64 ones

    def _try_to_draw(self) -> None:
        """Drawing packages are imported on the first picture; a missing one is a mistake of the start, not of the first episode."""
        try:
            self._vector.reset(seed=[0])
            picture = self._vector.envs[0].render()
        except gym.error.DependencyNotInstalled as error:
            raise ImportError(f"{self.spec.name}: {error}") from error
        if self._render_mode == "rgb_array" and not (isinstance(picture, np.ndarray) and picture.ndim == 3):
            raise ValueError(f"{self.spec.name} draws no pictures: render() returned {type(picture).__name__}")


def _giver(env: gym.Env) -> Callable[[], gym.Env]:
    return lambda: env


def _action(space: spaces.Space) -> Discrete | Continuous:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        raise ValueError(f"actions of {space} are neither Discrete nor a Box of floats")
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        bounded = np.isfinite(high - low).all()
    if not bounded:
        raise ValueError(
            f"actions of {space} have no bounds whose distance float32 can hold, and a policy's actions are stretched between "
            "them; give the environment bounds where it is made, with gymnasium.wrappers.TransformAction(env, lambda action: action, "
            f"gymnasium.spaces.Box(-1.0, 1.0, {space.shape}, env.action_space.dtype))")
    return Continuous(low, high)
