"""Provide MinAtar (1903.03176), five Atari games on 10 x 10 boolean planes, which a CPU learns in minutes.

The game rules are those of the package. Its `minatar.Environment` is not used, because its import takes seconds (pyplot
and seaborn) and it only adds the sticky actions below.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import Clipping, Env, EnvParams, checked_discrete, clipped, env_seeds, reset_timestep, resolve_name
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
PICTURE_SCALE = 32  # pixels per cell in `render`
FRAME_RATE = 20.0  # because the package shows each picture for 50 ms


@frozen_dataclass
class MinAtarParams(EnvParams):
    sticky_action_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    """Probability that the last action is repeated (MinAtar's protocol: 0.1)."""
    difficulty_ramping: bool = True
    """Make asterix, seaquest and space_invaders faster as they go on."""
    minimal_action_set: bool = True
    """Offer the actions of MinAtar/...-v1; without it all six, as MinAtar/...-v0."""
    max_steps: int = Field(default=5_000, ge=1, le=10**9)
    """Agent steps after which an episode is truncated. The package itself ends freeway after 2,501 steps."""
    reward_clipping: Clipping = "none"
    """Clipping of rewards, in training only."""


class MinAtarEnv(Env):
    """E environments of one game in one thread. spec.name is "minatar_<game>", as Atari has games of the same names."""

    Params = MinAtarParams

    def __init__(
        self,
        params: MinAtarParams,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        if render_mode == "human":
            raise ValueError('MinAtar opens no window; use --record, or render_mode "rgb_array"')
        name = resolve_name(game, GAMES)
        self._games = [_game_module(name).Env(ramping=params.difficulty_ramping) for _ in range(num_envs)]
        self._actions = np.array(self._games[0].minimal_action_set() if params.minimal_action_set else range(6))
        self._params, self._num_envs = params, num_envs
        self._clipping = params.reward_clipping if training else "none"
        self._discrete = Discrete(len(self._actions))
        frame = ArraySpec(tuple(self._games[0].state_shape()), "uint8")
        self.spec = EnvSpec(
            name=f"minatar_{name}",
            frame=frame,
            frame_stack=0,
            action=self._discrete,
            is_image=True,
            frame_rate=FRAME_RATE,
        )

    def reset(self, seed: int) -> TimeStep:
        seeds = env_seeds(seed, self._num_envs)
        self._random = np.random.default_rng(seeds)  # draws sticky actions
        for game, game_seed in zip(self._games, seeds.tolist()):
            game.random = np.random.RandomState(game_seed)  # the games call methods of this class
            game.reset()
        self._last_actions = np.zeros(self._num_envs, np.int64)
        self._steps = np.zeros(self._num_envs, np.int64)
        self._ended = np.zeros(self._num_envs, bool)
        return reset_timestep(self._observation())

    def step(self, action: np.ndarray) -> TimeStep:
        action = self._actions[checked_discrete(action, self._num_envs, self._discrete)]
        first = self._ended
        sticky = self._random.random(self._num_envs) < self._params.sticky_action_prob
        # at the start of an episode there is no action to repeat
        self._last_actions = np.where(first, 0, np.where(sticky, self._last_actions, action))
        raw_reward, terminated = np.zeros(self._num_envs, np.float32), np.zeros(self._num_envs, bool)
        actions = self._last_actions.tolist()
        for env_ind, (game, restart, taken) in enumerate(zip(self._games, first.tolist(), actions)):
            if restart:
                game.reset()
            else:
                raw_reward[env_ind], terminated[env_ind] = game.act(taken)
        self._steps = np.where(first, 0, self._steps + 1)
        self._ended = terminated | (self._steps >= self._params.max_steps)
        discount = 1.0 - terminated.astype(np.float32)
        reward = clipped(raw_reward, self._clipping)
        return TimeStep(self._observation(), reward, discount, first, self._ended, raw_reward)

    def render(self) -> np.ndarray:
        state = self._games[0].state()  # [10, 10, C] bool
        planes = np.arange(1, state.shape[2] + 1)
        top = (state * planes).max(2)  # the plane with the highest index covers the others
        cells: np.ndarray = _palette(state.shape[2])[top]
        return cells.repeat(PICTURE_SCALE, 0).repeat(PICTURE_SCALE, 1)

    def _observation(self) -> np.ndarray:
        return np.stack([game.state() for game in self._games]).view(np.uint8)


def _palette(num_planes: int) -> np.ndarray:
    """Return black and a colour per plane with evenly spaced hues, [1 + num_planes, 3] uint8."""
    hues = np.arange(num_planes)[:, None] / num_planes + np.array([0, 1 / 3, 2 / 3])
    colours = 140 + 110 * np.cos(2 * np.pi * hues)
    return np.concatenate([np.zeros((1, 3)), colours]).astype(np.uint8)


@cache
def _game_module(name: str) -> ModuleType:
    """Import minatar/environments/<name>.py without the package's __init__."""
    package = importlib.util.find_spec("minatar")
    if package is None or not package.submodule_search_locations:
        raise ImportError('MinAtar is missing: pip install -e ".[minatar]"')
    path = Path(package.submodule_search_locations[0], "environments", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"core.envs.minatar_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
