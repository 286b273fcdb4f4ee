"""Provide tic-tac-toe against an opponent that plays at random, with masks of legal actions.

Random play scores 0, since each side begins every other game. Perfect play scores 0.96.
"""

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import Env, EnvParams, checked_discrete, reset_timestep, resolve_name
from core.ops.actions import random_legal_actions
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep


@frozen_dataclass
class TicTacToeParams(EnvParams):
    opponent_begins: float = Field(default=0.5, ge=0, le=1)
    """Share of games in which the opponent begins."""


CELLS = 9
# [8, 3] cells of each row, column and diagonal
LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


class TicTacToeEnv(Env):
    """E games of tic-tac-toe.

    Observations are 9 flags of the agent's cells and 9 of the opponent's. Actions are cells, of which the empty ones
    are legal; an illegal one is an error. The reward is 1 for a win, -1 for a loss and 0 for a draw.
    """

    Params = TicTacToeParams

    def __init__(
        self,
        params: TicTacToeParams,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        if render_mode is not None:
            raise ValueError(f"tictactoe draws no pictures, so that render_mode {render_mode!r} is impossible")
        self._params, self._num_envs, self._actions = params, num_envs, Discrete(CELLS)
        self.spec = EnvSpec(
            name=resolve_name(game, ("tictactoe",)),
            frame=ArraySpec((2 * CELLS,), "float32"),
            frame_stack=0,
            action=self._actions,
            has_action_mask=True,
        )

    def reset(self, seed: int) -> TimeStep:
        self._random = np.random.default_rng(seed)
        self._cells = np.zeros((2, self._num_envs, CELLS), bool)  # of the agent, of the opponent
        self._last = np.zeros(self._num_envs, bool)
        self._start(~self._last)
        return reset_timestep(self._observation(), self._empty())

    def step(self, action: np.ndarray) -> TimeStep:
        action = checked_discrete(action, self._num_envs, self._actions)
        first, envs = self._last, np.arange(self._num_envs)
        taken = ~first & ~self._empty()[envs, action]
        if taken.any():
            env_ind = int(taken.argmax())
            raise ValueError(f"action {action[env_ind]} of environment {env_ind} is illegal: that cell is taken")
        self._cells[0, envs, action] |= ~first
        won = self._has_line(0) & ~first
        self._reply(~first & ~won & self._empty().any(1))
        lost = self._has_line(1) & ~first & ~won
        self._last = ~first & (won | lost | ~self._empty().any(1))
        self._start(first)
        reward = won.astype(np.float32) - lost
        discount = 1 - self._last.astype(np.float32)
        return TimeStep(self._observation(), reward, discount, first, self._last, reward, self._empty())

    def _start(self, starts: np.ndarray) -> None:
        """Empty the boards where `starts` [E] is True, and let the opponent begin on some of them."""
        self._cells[:, starts] = False
        self._reply(starts & (self._random.random(self._num_envs) < self._params.opponent_begins))

    def _reply(self, replies: np.ndarray) -> None:
        """Let the opponent take a random empty cell of each board where `replies` [E] is True."""
        cells = random_legal_actions(self._empty(), (CELLS,), self._random)[:, 0]
        self._cells[1, np.arange(self._num_envs), cells] |= replies

    def _has_line(self, player: int) -> np.ndarray:
        """Return the environments in which the player has three cells in a line, [E] bool."""
        lines: np.ndarray = self._cells[player][:, LINES].all(2).any(1)
        return lines

    def _empty(self) -> np.ndarray:
        """Return the empty cells, [E, 9] bool."""
        return np.logical_not(self._cells.any(0))

    def _observation(self) -> np.ndarray:
        return np.concatenate([*self._cells], 1).astype(np.float32)
