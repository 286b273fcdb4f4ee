"""Provide the game Catch (of bsuite, after Mnih et al. 2014): a ball falls and a paddle moves under it.

Random play scores about -0.6, perfect play 1. Agents learn the game in seconds, so tests use it to prove that a whole
algorithm learns.
"""

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import Env, EnvParams, checked_discrete, reset_timestep, resolve_name
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

PICTURE_SCALE = 32  # pixels per cell in `render`


@frozen_dataclass
class CatchParams(EnvParams):
    rows: int = Field(default=10, ge=3, le=1_024)
    """Rows of the board, which are the steps of an episode and one more."""
    columns: int = Field(default=5, ge=3, le=1_024)
    """Columns of the board."""


class CatchEnv(Env):
    """E games of Catch.

    Observations are planes [rows, columns, 2] of ball and paddle, actions left, stay and right. When the ball is down,
    the episode ends with reward 1 or -1.
    """

    Params = CatchParams

    def __init__(
        self,
        params: CatchParams,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        if render_mode == "human":
            raise ValueError('catch opens no window; use --record, or render_mode "rgb_array"')
        self._params, self._num_envs, self._actions = params, num_envs, Discrete(3)
        frame = ArraySpec((params.rows, params.columns, 2), "uint8")
        self.spec = EnvSpec(
            name=resolve_name(game, ("catch",)), frame=frame, frame_stack=0, action=self._actions, is_image=True
        )

    def reset(self, seed: int) -> TimeStep:
        self._random = np.random.default_rng(seed)
        self._row, self._ball, self._paddle = np.zeros((3, self._num_envs), np.int64)
        self._ended = np.zeros(self._num_envs, bool)
        self._start(~self._ended)
        return reset_timestep(self._observation())

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
        ball, paddle = np.moveaxis(self._observation()[0], -1, 0)
        picture = np.stack([ball, paddle, ball], -1) * 255
        return picture.repeat(PICTURE_SCALE, 0).repeat(PICTURE_SCALE, 1)

    def _start(self, starts: np.ndarray) -> None:
        """Start an episode in each environment where `starts` [E] is True."""
        balls = self._random.integers(self._params.columns, size=self._num_envs)
        self._row = np.where(starts, 0, self._row)
        self._ball = np.where(starts, balls, self._ball)
        self._paddle = np.where(starts, self._params.columns // 2, self._paddle)

    def _observation(self) -> np.ndarray:
        planes = np.zeros((self._num_envs, self._params.rows, self._params.columns, 2), np.uint8)
        envs = np.arange(self._num_envs)
        planes[envs, self._row, self._ball, 0] = 1
        planes[envs, -1, self._paddle, 1] = 1
        return planes
