"""Provide Atari 2600 games on ale_py's C++ thread pool, where E emulators step without the GIL.

Three options of the emulator are replaced on purpose:

- A lost life never ends a game. The emulator's `episodic_life` would restart it.
- Rewards are clipped here, because the score needs them raw.
- Episodes are truncated here. The emulator's own limit returns a final picture that blends two agent steps, and a
  truncated episode bootstraps from that picture.

With `use_fire_reset`, FIRE replaces the action after a lost life in evaluations: a greedy policy that never presses it
would wait for the time limit. Games that ignore FIRE while they show the loss, as Gopher does, still wait. In training
the action is the agent's, because stored actions must be those taken.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import (
    Clipping,
    Env,
    EnvParams,
    Size,
    checked_discrete,
    clipped,
    env_seeds,
    height_and_width,
    normalized_name,
    reset_timestep,
    resized,
    resolve_name,
)
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

TABLE = Path(__file__).with_name("atari_human_random.csv")
# Games for two players only, on whose ROMs the emulator ends the process
TWO_PLAYERS_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})


class Protocol(NamedTuple):
    """The settings in which the protocols of Atari results differ. Its fields are those of AtariParams."""

    noop_max: int
    repeat_action_probability: float
    life_loss: bool
    full_action_space: bool
    use_fire_reset: bool


PROTOCOLS = {
    # DQN (Nature 2015) to LASER. FIRE starts the games that wait for that button (OpenAI baselines).
    "classic": Protocol(
        noop_max=30, repeat_action_probability=0.0, life_loss=True, full_action_space=False, use_fire_reset=True
    ),
    # Machado et al. 2018 (1709.06009): sticky actions instead of no-ops, no knowledge of the game's lives or actions.
    "machado": Protocol(
        noop_max=0, repeat_action_probability=0.25, life_loss=False, full_action_space=True, use_fire_reset=False
    ),
}


@frozen_dataclass
class AtariParams(EnvParams):
    """Options of the Atari environment. Options that are None follow `protocol`."""

    protocol: Literal["classic", "machado"] = "classic"
    """Preset of options that are None. classic: no-ops up to 30, lost lives, the game's own actions, FIRE at a reset;
    machado: sticky actions with probability 0.25, all 18 actions, none of the rest."""
    noop_max: int | None = Field(default=None, ge=0, le=10_000)
    """Largest number of no-op frames (FIRE is one) that an episode starts with; the number is drawn."""
    repeat_action_probability: float | None = Field(default=None, ge=0.0, le=1.0)
    """Probability of each frame that the last action is repeated (sticky actions)."""
    life_loss: bool | None = None
    """Set the discount to 0 at a lost life, in training only; the game goes on."""
    full_action_space: bool | None = None
    """Offer all 18 actions instead of those that the game reads."""
    use_fire_reset: bool | None = None
    """Press FIRE where the game has it: at the start and, in evaluations, after a lost life."""
    frameskip: int = Field(default=4, ge=1, le=1_000)
    """Frames of an agent step."""
    frame_stack: int = Field(default=4, ge=0, le=64)
    """Agent steps whose pictures are seen together; 0 is one picture, without a stack axis."""
    resolution: Size = 84
    """Height and width of the pictures in pixels; one number stands for both."""
    grayscale: bool = True
    """See grey pictures; without it they are coloured, [H, W, 3]."""
    maxpool: bool = True
    """Take the maximum of the last two frames, so that sprites that flicker stay visible."""
    reward_clipping: Clipping = "sign"
    """Clipping of rewards, in training only."""
    max_frames: int = Field(default=108_000, ge=1, le=10**9)
    """Frames after which an episode is truncated (30 minutes)."""

    @property
    def max_steps(self) -> int:
        """Return the agent steps after which an episode is truncated."""
        return max(1, self.max_frames // self.frameskip)

    def rules(self) -> Protocol:
        """Return the protocol, in which settings that are not None replace those of the protocol."""
        own = {name: getattr(self, name) for name in Protocol._fields}
        return PROTOCOLS[self.protocol]._replace(**{name: value for name, value in own.items() if value is not None})


@cache
def atari_games() -> tuple[str, ...]:
    """Return the games of ale_py that one player can play. Raises ImportError without ale_py."""
    try:
        from ale_py import roms
    except ImportError as error:
        raise ImportError(f'{error}; Atari needs: pip install "ale-py>=0.12" "gymnasium>=1.1"') from error
    return tuple(sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS_ONLY))


@cache
def human_random_scores() -> dict[str, tuple[float, float]]:
    """Return normalised game name -> (human score, random score)."""
    with TABLE.open(newline="") as file:
        return {
            normalized_name(row["game"]): (float(row["human"]), float(row["random"])) for row in csv.DictReader(file)
        }


class AtariEnv(Env):
    """E environments of one game. `lives` [E] are those of the last step."""

    Params = AtariParams

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
        name, rules = resolve_name(game, atari_games()), params.rules()
        self._emulator = _emulator(params, name, num_envs, num_threads, render_mode)
        self._num_envs, self._max_steps = num_envs, params.max_steps
        self._life_loss = training and rules.life_loss
        self._clipping = params.reward_clipping if training else "none"
        actions = [action.name for action in self._emulator.ale.get_action_set()]
        pressed = rules.use_fire_reset and not training and "FIRE" in actions
        self._fire = actions.index("FIRE") if pressed else None
        self._actions = Discrete(len(actions))
        shape = (*height_and_width(params.resolution), *([] if params.grayscale else [3]))
        self.spec = EnvSpec(
            name=name,
            frame=ArraySpec(shape, "uint8"),
            frame_stack=params.frame_stack,
            action=self._actions,
            frames_per_step=params.frameskip,
            is_image=True,
            max_value=255.0,
        )

    @classmethod
    def human_normalized(cls, game: str, score: float) -> float | None:
        scores = human_random_scores().get(normalized_name(game))
        return None if scores is None else (score - scores[1]) / (scores[0] - scores[1])

    def reset(self, seed: int) -> TimeStep:
        observation, info = self._emulator.reset(seed=env_seeds(seed, self._num_envs))
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
        return np.asarray(self._emulator.render())

    def close(self) -> None:
        self._emulator.close()
        del self._emulator  # the last reference, with which the emulator's threads end

    def _stacked(self, observation: np.ndarray) -> np.ndarray:
        return observation if self.spec.frame_stack else observation[:, 0]


def _emulator(params: AtariParams, name: str, num_envs: int, num_threads: int, render_mode: str | None) -> Any:
    if render_mode is not None:  # the thread pool cannot render
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
        max_num_frames_per_episode=(params.max_steps + 2) * params.frameskip,  # not reached: AtariEnv truncates first
    )


class RenderableAtari:
    """One environment that can be rendered, with next-step autoreset and the methods of AtariVectorEnv that are called.

    Its observations equal those of AtariVectorEnv in every byte.
    """

    def __init__(self, params: AtariParams, name: str, render_mode: str):
        import ale_py

        rom = ale_py.roms.get_rom_path(name)
        assert rom is not None, name
        self._params, self._rules, self._rom = params, params.rules(), rom
        self._ale, self._action = ale_py.ALEInterface(), ale_py.Action
        self._ale.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale.setFloat("repeat_action_probability", self._rules.repeat_action_probability)
        self._ale.setBool("display_screen", render_mode == "human")
        self._ale.loadROM(self._rom)
        full = self._rules.full_action_space
        self._actions = self._ale.getLegalActionSet() if full else self._ale.getMinimalActionSet()
        self._fire = self._rules.use_fire_reset and self._action.FIRE in self._actions
        self._ended = False

    def reset(
        self, *, seed: np.ndarray | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(int(seed[0]))
            self._ale.setInt("random_seed", int(seed[0]))
            self._ale.loadROM(self._rom)
        self._restart()
        return self._stack[None], self._info()

    def send(self, action: np.ndarray) -> None:
        self._sent = action

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        reward = 0
        if self._ended:
            self._restart()
        else:
            reward = self._advance(self._actions[int(self._sent[0])])
        return self._stack[None], np.array([reward]), np.array([self._ended]), np.array([False]), self._info()

    @property
    def ale(self) -> "RenderableAtari":
        """Return the object that knows the actions, which AtariVectorEnv keeps under this name."""
        return self

    def get_action_set(self) -> list[Any]:
        return list(self._actions)

    def render(self) -> np.ndarray:
        return self._ale.getScreenRGB()

    def close(self) -> None:
        del self._ale

    def _restart(self) -> None:
        self._ale.reset_game()
        if self._fire:
            self._ale.act(self._action.FIRE)
        for _ in range(int(self._random.integers(self._rules.noop_max + 1)) - self._fire):
            self._ale.act(self._action.NOOP)
            if self._ale.game_over():
                self._ale.reset_game()
        self._ended = False
        newest = self._screen()
        self._screens = [newest, np.zeros_like(newest)]
        frame = self._frame()
        # [S, H, W] or [S, H, W, 3]
        self._stack = np.stack([*[np.zeros_like(frame)] * (max(self._params.frame_stack, 1) - 1), frame])

    def _advance(self, action: Any) -> int:
        reward = 0
        for frames_left in range(self._params.frameskip, 0, -1):
            reward += self._ale.act(action)
            self._ended = self._ale.game_over()
            if self._ended:  # the picture stays that of the frames before, as in AtariVectorEnv
                break
            if frames_left <= 2:
                self._screens[frames_left - 1] = self._screen()
        self._stack = np.concatenate([self._stack[1:], self._frame()[None]])
        return reward

    def _screen(self) -> np.ndarray:
        return self._ale.getScreenGrayscale() if self._params.grayscale else self._ale.getScreenRGB()

    def _frame(self) -> np.ndarray:
        if self._params.maxpool:
            self._screens[0] = np.maximum(*self._screens)
        return resized(self._screens[0], self._params.resolution)

    def _info(self) -> dict[str, Any]:
        return {"lives": np.array([self._ale.lives()])}
