"""Catch (bsuite's, after Mnih et al. 2014): a ball falls and a paddle moves under it. Random play scores about -0.6, perfect play 1.

Learnt in seconds, so tests use it where a whole algorithm has to prove that it learns.
"""


import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import Env, EnvParams
from core.envs.argument_checks import check_construction, checked_discrete
from core.envs.game_names import closest
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

PICTURE_SCALE = 32  # pixels a cell, in render


@frozen_dataclass
class CatchParams(EnvParams):
    rows: int = Field(default=10, ge=3, le=1_024)
    """Rows of the board, which are the steps of an episode and one more."""
    columns: int = Field(default=5, ge=3, le=1_024)
    """Columns of the board."""


class CatchEnv(Env):
    """Planes [rows, columns, 2]: ball, paddle. Actions left, stay, right; reward 1 or -1 when the ball is down, which ends the episode."""

    Params = CatchParams

    def __init__(self, params: CatchParams, game: str, num_envs: int, *, training: bool = True, num_threads: int = 1,
                 render_mode: str | None = None):
        check_construction(num_envs, num_threads, render_mode)
        if render_mode == "human":
            raise ValueError('catch opens no window; use render_mode "rgb_array"')
        self._params, self._num_envs, self._render_mode, self._actions = params, num_envs, render_mode, Discrete(3)
        self.spec = EnvSpec(name=closest(game, ("catch",)), frame=ArraySpec((params.rows, params.columns, 2), "uint8"), frame_stack=0,
                            action=self._actions, is_image=True)

    def reset(self, seed: int) -> TimeStep:
        self._random = np.random.default_rng(seed)
        self._row, self._ball, self._paddle = np.zeros((3, self._num_envs), np.int64)
        every = np.ones(self._num_envs, bool)
        self._ended = ~every
        self._start(every)
        zeros = np.zeros(self._num_envs, np.float32)
        return TimeStep(self._observation(), zeros, zeros + 1, every, ~every, zeros)

    def step(self, action: np.ndarray) -> TimeStep:
        action = checked_discrete(action, self._num_envs, self._actions)
        first = self._ended
        self._row += 1
        self._paddle = np.clip(self._paddle + action - 1, 0, self._params.columns - 1)
        self._start(first)
        self._ended = self._row == self._params.rows - 1
        reward = np.where(self._ended, np.where(self._ball == self._paddle, 1, -1), 0).astype(np.float32)
        return TimeStep(self._observation(), reward, 1 - self._ended.astype(np.float32), first, self._ended, reward)

    def render(self) -> np.ndarray:
        if self._render_mode != "rgb_array":
            return super().render()
        ball, paddle = np.moveaxis(self._observation()[0], -1, 0)
        picture = np.stack([ball, paddle, ball], -1) * 255
        return picture.repeat(PICTURE_SCALE, 0).repeat(PICTURE_SCALE, 1)

    def _start(self, streams: np.ndarray) -> None:
        """New episodes in these streams [E] bool."""
        balls = self._random.integers(self._params.columns, size=self._num_envs)
        self._row = np.where(streams, 0, self._row)
        self._ball = np.where(streams, balls, self._ball)
        self._paddle = np.where(streams, self._params.columns // 2, self._paddle)

    def _observation(self) -> np.ndarray:
        planes = np.zeros((self._num_envs, self._params.rows, self._params.columns, 2), np.uint8)
        streams = np.arange(self._num_envs)
        planes[streams, self._row, self._ball, 0] = 1
        planes[streams, -1, self._paddle, 1] = 1
        return planes
