"""Provide a memory task: a cue is shown in the first observation only and must be named `delay` steps later.

Without memory no policy scores more than guessing, 2 / cues - 1 on average. With memory every episode scores 1.
"""

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import Env, EnvParams, checked_discrete, reset_timestep, resolve_name
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep


@frozen_dataclass
class RecallParams(EnvParams):
    cues: int = Field(default=3, ge=2, le=1_024)
    """Number of different cues, and of actions."""
    delay: int = Field(default=8, ge=1, le=10_000)
    """Steps between the cue and the question."""


class RecallEnv(Env):
    """E recall tasks. Observations are vectors [cues + 1] float32.

    The first observation holds the cue, one-hot. `delay` steps later the last element is 1, which is the question; all
    other elements are 0. The action after the question earns 1 if it names the cue, else -1, and ends the episode.
    Other actions earn 0.
    """

    Params = RecallParams

    def __init__(
        self,
        params: RecallParams,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        if render_mode is not None:
            raise ValueError("recall draws no pictures")
        self._params, self._num_envs, self._actions = params, num_envs, Discrete(params.cues)
        self.spec = EnvSpec(
            name=resolve_name(game, ("recall",)),
            frame=ArraySpec((params.cues + 1,), "float32"),
            frame_stack=0,
            action=self._actions,
        )

    def reset(self, seed: int) -> TimeStep:
        self._random = np.random.default_rng(seed)
        self._step, self._cue = np.zeros((2, self._num_envs), np.int64)
        self._ended = np.zeros(self._num_envs, bool)
        self._start(~self._ended)
        return reset_timestep(self._observation())

    def step(self, action: np.ndarray) -> TimeStep:
        action = checked_discrete(action, self._num_envs, self._actions)
        first, asked = self._ended, self._asked
        reward = np.where(asked, np.where(action == self._cue, 1, -1), 0).astype(np.float32)
        self._step += 1
        self._start(first)
        self._ended = self._step > self._params.delay
        return TimeStep(self._observation(), reward, 1 - self._ended.astype(np.float32), first, self._ended, reward)

    @property
    def _asked(self) -> np.ndarray:
        return np.equal(self._step, self._params.delay)

    def _start(self, starts: np.ndarray) -> None:
        """Start an episode in each environment where `starts` [E] is True."""
        self._cue = np.where(starts, self._random.integers(self._params.cues, size=self._num_envs), self._cue)
        self._step = np.where(starts, 0, self._step)

    def _observation(self) -> np.ndarray:
        vectors = np.zeros((self._num_envs, self._params.cues + 1), np.float32)
        shown = np.flatnonzero(self._step == 0)
        vectors[shown, self._cue[shown]] = 1
        vectors[:, -1] = self._asked
        return vectors
