"""Playing whole episodes to measure an agent: raw returns, no bias towards short episodes, a cap on endless ones."""

from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
import torch

from core.agent import ActorOutput, Agent, Exploration
from core.env import Env
from core.model import restart
from core.types import TimeStep


class EpisodeResults(NamedTuple):
    """N episodes: the first of every stream, then the second of every stream, and so on."""

    returns: np.ndarray    # [N] float64, sums of raw rewards
    lengths: np.ndarray    # [N] int64, agent steps
    truncated: np.ndarray  # [N] bool, ended by a time limit, the environment's or `max_steps`
    solved: np.ndarray | None = None  # [N] bool; None where it is not known what solving an episode is


class Episode(NamedTuple):
    score: float
    length: int
    truncated: bool
    solved: bool | None


class RenderedStep(NamedTuple):
    """What can be seen of stream 0 after a step, or after a reset."""

    picture: np.ndarray              # [H, W, 3] uint8
    observation: np.ndarray          # [*observation_shape]
    score: float                     # raw rewards of the episode so far
    length: int                      # agent steps of the episode so far
    action: np.ndarray | None        # that led here; None: a reset did
    outlook: dict[str, np.ndarray]   # what the agent made of it when it chose that action: Agent.policy_diagnostics, each [] or [N]


def play_episodes(agent: Agent, env: Env, episodes: int, max_steps: int, exploration: Exploration | None, seed: int,
                  on_scene: Callable[[RenderedStep], None] | None = None,
                  on_episode: Callable[[Episode], None] | None = None) -> Generator[bool, None, EpisodeResults]:
    """Play `episodes` episodes over the streams of `env`; yields True after every step of it.

    Which episodes count is fixed beforehand: each stream plays its share, so a stream of short episodes does not play more of
    them. An episode of max_steps agent steps is cut and counts as truncated; its stream waits for the game to end, or until all
    streams that have episodes left wait and the environment is reset. An episode is solved if the environment says so at its last
    step (Env.success), or, where it says nothing, if its score reaches EnvSpec.reward_threshold. `on_scene` gets what stream 0
    shows at each step (render_mode "rgb_array").
    """
    sequence = np.random.SeedSequence(seed)
    timestep = env.reset(_seed_from(sequence))
    tally = _Tally(len(timestep.first), episodes, max_steps, env)
    initial = state = agent.initial_state(len(timestep.first))

    def show(output: ActorOutput | None) -> None:
        if on_scene is not None:
            outlook = {} if output is None else {name: values[0] for name, values in agent.policy_diagnostics(output).items()}
            action = None if output is None else output.action[0]
            on_scene(RenderedStep(env.render(), timestep.observation[0].copy(), *tally.of(0), action, outlook))

    show(None)
    while not tally.done:
        state = restart(state, timestep.first, initial)
        with torch.inference_mode():
            output = agent.act(timestep, state, exploration)
        timestep, state = env.step(output.action), output.state
        episodes_ended = tally.count(timestep)
        show(output)
        for episode in episodes_ended:
            if on_episode is not None:
                on_episode(episode)
        if tally.all_wait:
            timestep = env.reset(_seed_from(sequence))
            tally.restart()
            show(None)
        yield True
    return tally.results()


class _Tally:
    """Scores and lengths of the E running episodes, and what is left to play."""

    def __init__(self, num_envs: int, episodes: int, max_steps: int, env: Env):
        self._max_steps, self._env = max_steps, env
        self._left = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs).astype(np.int64)  # [E]
        self._finished: list[list[Episode]] = [[] for _ in range(num_envs)]
        self._waiting = np.zeros(num_envs, bool)
        self.restart()

    @property
    def done(self) -> bool:
        return not self._left.any()

    @property
    def all_wait(self) -> bool:
        """There is more to play, and only by streams that were cut."""
        return not self.done and bool(self._waiting[self._left > 0].all())

    def restart(self) -> None:
        """All streams start an episode."""
        self._waiting[:] = False
        self._scores, self._lengths = np.zeros(len(self._left)), np.zeros(len(self._left), np.int64)

    def count(self, timestep: TimeStep) -> list[Episode]:
        """Add one step of all streams. Returns the episodes that it finished."""
        self._scores[timestep.first], self._lengths[timestep.first] = 0.0, 0
        self._waiting[timestep.first] = False
        moved = ~timestep.first
        self._scores[moved] += timestep.raw_reward[moved]
        self._lengths[moved] += 1
        cut = (self._lengths >= self._max_steps) & ~timestep.last
        ended = (timestep.last | cut) & ~self._waiting & (self._left > 0)
        self._waiting |= cut
        return [self._finish(stream, bool(cut[stream] or timestep.discount[stream] != 0)) for stream in np.flatnonzero(ended).tolist()]

    def of(self, stream: int) -> tuple[float, int]:
        """Score and length of the episode that runs there, or has just ended."""
        return float(self._scores[stream]), int(self._lengths[stream])

    def results(self) -> EpisodeResults:
        rounds = max(len(finished) for finished in self._finished)
        ordered = [finished[number] for number in range(rounds) for finished in self._finished if number < len(finished)]
        return EpisodeResults(np.array([episode.score for episode in ordered], np.float64),
                              np.array([episode.length for episode in ordered], np.int64),
                              np.array([episode.truncated for episode in ordered], bool),
                              None if any(episode.solved is None for episode in ordered)
                              else np.array([episode.solved for episode in ordered], bool))

    def _finish(self, stream: int, truncated: bool) -> Episode:
        score, threshold, solved = float(self._scores[stream]), self._env.spec.reward_threshold, self._env.success(stream)
        if solved is None and threshold is not None:
            solved = score >= threshold
        episode = Episode(score, int(self._lengths[stream]), truncated, solved)
        self._finished[stream].append(episode)
        self._left[stream] -= 1
        return episode


def _seed_from(sequence: np.random.SeedSequence) -> int:
    """A new seed each time."""
    return int(sequence.spawn(1)[0].generate_state(1)[0] >> 1)
