"""Provide Atari 2600 games on ale_py's C++ thread pool, where E emulators step without the GIL.

Three options of the emulator are replaced on purpose:

- A lost life never ends a game. The emulator's `episodic_life` would restart it.
- Rewards are clipped here, because the score needs them raw.
- Episodes are truncated here. The emulator's own limit returns a final picture that blends two agent steps, and a
  truncated episode bootstraps from that picture.

With `use_fire_reset`, FIRE replaces the action after a lost life in evaluations: a greedy policy that never presses it
would wait for the time limit. In training the action is the agent's, because stored actions must be those taken.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from core.env import Env
from core.envs.argument_checks import check_construction, checked_discrete, reset_timestep, stream_seeds
from core.envs.atari_protocols import AtariParams
from core.envs.game_names import atari_game, normalized_name
from core.envs.preprocessing import clipped, height_and_width
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

TABLE = Path(__file__).with_name("atari_human_random.csv")


@cache
def human_random_scores() -> dict[str, tuple[float, float]]:
    """Return normalised game name -> (human score, random score)."""
    with TABLE.open(newline="") as file:
        return {
            normalized_name(row["game"]): (float(row["human"]), float(row["random"])) for row in csv.DictReader(file)
        }


def human_normalized(name: str, score: float) -> float | None:
    """Return (score - random) / (human - random) for a game in any spelling, or None without a human score."""
    scores = human_random_scores().get(normalized_name(name))
    if scores is None:
        return None
    human, random = scores
    return (score - random) / (human - random)


class AtariEnv(Env):
    """E streams of one game. `lives` [E] are those of the last step."""

    Params = AtariParams
    human_normalized = staticmethod(human_normalized)  # (game, score) -> normalised score

    def __init__(
        self,
        params: AtariParams,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        check_construction(num_envs, num_threads, render_mode)
        name = atari_game(game)
        self._emulator = _emulator(params, name, num_envs, num_threads, render_mode)
        self._num_envs, self._max_steps = num_envs, params.max_steps
        self._life_loss = training and params.rules().life_loss
        self._clipping = params.reward_clipping if training else "none"
        self._fire = _fire_action(self._emulator) if params.rules().use_fire_reset and not training else None
        self._render_mode = render_mode
        shape = (*height_and_width(params.resolution), *([] if params.grayscale else [3]))
        self._actions = Discrete(int(self._emulator.single_action_space.n))
        self.spec = EnvSpec(
            name=name,
            frame=ArraySpec(shape, "uint8"),
            frame_stack=params.frame_stack,
            action=self._actions,
            frames_per_step=params.frameskip,
            is_image=True,
            max_value=255.0,
        )

    def reset(self, seed: int) -> TimeStep:
        observation, info = self._emulator.reset(seed=stream_seeds(seed, self._num_envs))
        self.lives = info["lives"]
        self._steps = np.zeros(self._num_envs, np.int64)  # agent steps of the running episodes
        self._ended = np.zeros(self._num_envs, bool)
        self._cut = np.zeros(self._num_envs, bool)  # truncated here, and still to be reset in the emulator
        self._lost_life = np.zeros(self._num_envs, bool)  # in the last step
        return reset_timestep(self._stacked(observation))

    def step(self, action: np.ndarray) -> TimeStep:
        self.send(action)
        return self.recv()

    def send(self, action: np.ndarray) -> None:
        # an action outside the space would block the emulator for ever
        action = checked_discrete(action, self._num_envs, self._actions)
        self._emulator.send(action if self._fire is None else np.where(self._lost_life, self._fire, action))

    def recv(self) -> TimeStep:
        first = self._ended
        observation, reward, terminated, _, info = self._emulator.recv()
        if self._cut.any():
            observation, info = self._emulator.reset(options={"reset_mask": self._cut})  # leaves the others unchanged
            terminated = terminated & ~self._cut
        raw_reward = np.where(first, 0, reward).astype(np.float32)
        self._lost_life = (info["lives"] < self.lives) & ~first
        dead = terminated | self._lost_life if self._life_loss else terminated
        self.lives = info["lives"]
        self._steps = np.where(first, 0, self._steps + 1)
        self._cut = (self._steps >= self._max_steps) & ~terminated
        self._ended = terminated | self._cut
        discount = 1.0 - dead.astype(np.float32)
        reward = clipped(raw_reward, self._clipping)
        return TimeStep(self._stacked(observation), reward, discount, first, self._ended, raw_reward)

    def render(self) -> np.ndarray:
        if self._render_mode != "rgb_array":
            return super().render()
        return np.asarray(self._emulator.render())

    def close(self) -> None:
        self._emulator.close()
        del self._emulator  # the last reference, with which the emulator's threads end

    def _stacked(self, observation: np.ndarray) -> np.ndarray:
        return observation if self.spec.frame_stack else observation[:, 0]


def _fire_action(emulator: Any) -> int | None:
    """Return the number of the action FIRE; None if the game does not read it."""
    actions = [action.name for action in emulator.ale.get_action_set()]
    return actions.index("FIRE") if "FIRE" in actions else None


def _emulator(params: AtariParams, name: str, num_envs: int, num_threads: int, render_mode: str | None) -> Any:
    if render_mode is not None:  # the thread pool cannot render
        from core.envs.atari_render import RenderableAtari

        return RenderableAtari(params, name, render_mode)
    from ale_py.vector_env import AtariVectorEnv

    rules, (height, width) = params.rules(), height_and_width(params.resolution)
    return AtariVectorEnv(
        name,
        num_envs,
        num_threads=min(num_threads, num_envs),
        frameskip=params.frameskip,
        stack_num=max(params.frame_stack, 1),
        img_height=height,
        img_width=width,
        grayscale=params.grayscale,
        maxpool=params.maxpool,
        noop_max=rules.noop_max + 1,  # the emulator draws from 0 .. noop_max - 1
        repeat_action_probability=rules.repeat_action_probability,
        full_action_space=rules.full_action_space,
        use_fire_reset=rules.use_fire_reset,
        episodic_life=False,
        reward_clipping=False,
        max_num_frames_per_episode=(params.max_steps + 2) * params.frameskip,
    )  # not reached: AtariEnv truncates first
