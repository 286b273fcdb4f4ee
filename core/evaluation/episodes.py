"""Play whole episodes to measure an agent.

The returns are raw, short episodes are not over-represented, and endless episodes are truncated.
"""

from collections.abc import Callable, Generator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch

from core.agent import ActorOutput, Agent, Exploration
from core.env import Env
from core.types import TimeStep, restart


class EpisodeResults(NamedTuple):
    """The results of N episodes, ordered: the first episode of every environment, then the second of each, ..."""

    returns: np.ndarray  # [N] float64, sums of raw rewards
    lengths: np.ndarray  # [N] int64, agent steps
    truncated: np.ndarray  # [N] bool, ended by a time limit of the environment or by `max_steps`
    solved: np.ndarray | None = None  # [N] bool; None if it is not known when an episode counts as solved


class Episode(NamedTuple):
    """The result of one episode."""

    score: float  # sum of raw rewards
    length: int  # agent steps
    truncated: bool
    success: bool | None  # as the environment says; None if it did not say yet


class RenderedStep(NamedTuple):
    """The picture of environment 0 after a step or a reset, and what led to it."""

    picture: np.ndarray  # [H, W, 3] uint8
    observation: np.ndarray  # [*observation_shape]
    score: float  # sum of raw rewards of the episode so far
    length: int  # agent steps of the episode so far
    action: np.ndarray | None  # action that led here; None after a reset
    # of the policy when it chose that action: Agent.policy_diagnostics, each [] or [N]
    diagnostics: dict[str, np.ndarray]


def results_of(episodes: Sequence[Episode], threshold: float | None) -> EpisodeResults:
    """Return the results of these episodes, of which there is at least one, in this order.

    An episode is solved if its environment says so. Some environments speak of successes only, so that one statement
    makes silence a failure. Without any statement an episode is solved if its score reaches the threshold.
    """
    scores, lengths, truncated, successes = zip(*episodes)
    returns, solved = np.array(scores, np.float64), None
    if any(success is not None for success in successes):
        solved = np.array([bool(success) for success in successes])
    elif threshold is not None:
        solved = returns >= threshold
    return EpisodeResults(returns, np.array(lengths, np.int64), np.array(truncated), solved)


def play_episodes(
    agent: Agent,
    env: Env,
    episodes: int,
    max_steps: int,
    exploration: Exploration | None,
    seed: int,
    on_step: Callable[[RenderedStep], None] | None = None,
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> Generator[bool, None, EpisodeResults]:
    """Play episodes in all environments. Yield True after every step.

    - Each environment plays a fixed number of episodes, so that those with short episodes do not contribute more.
    - An episode of `max_steps` steps counts as truncated. Its environment then waits until the game ends, or until all
      environments with episodes left wait and all are reset.
    - An episode is solved if `Env.success` says so at its last step, or by EnvSpec.reward_threshold (`results_of`).

    Args:
        agent: Chooses the actions.
        env: E environments.
        episodes: Total number of episodes.
        max_steps: Agent steps after which an episode is truncated.
        exploration: Exploration of the E environments; None acts greedily.
        seed: Seed of the environment.
        on_step: Called with environment 0 after every step and reset; needs render_mode "rgb_array".
        on_episode: Called at the end of every episode that counts.

    Returns:
        The results of all episodes.
    """
    sequence = np.random.SeedSequence(seed)
    timestep = env.reset(_next_seed(sequence))
    scheduler = _EpisodeScheduler(len(timestep.first), episodes, max_steps, env)
    initial = state = agent.initial_state(len(timestep.first))

    def show(output: ActorOutput | None) -> None:
        if on_step is None:
            return
        action, diagnostics = None, dict[str, np.ndarray]()
        if output is not None:
            action = output.action[0]
            diagnostics = {name: values[0] for name, values in agent.policy_diagnostics(output).items()}
        score, length = scheduler.running(0)
        picture, observation = env.render().copy(), timestep.observation[0].copy()  # arrays may be reused
        on_step(RenderedStep(picture, observation, score, length, action, diagnostics))

    show(None)
    while not scheduler.done:
        state = restart(state, timestep.first, initial)
        with torch.inference_mode():
            output = agent.act(timestep, state, exploration)
        timestep, state = env.step(output.action), output.state
        ended = scheduler.count(timestep)
        show(output)
        for episode in ended:
            on_episode(episode)
        if scheduler.all_wait:
            timestep = env.reset(_next_seed(sequence))
            scheduler.restart()
            show(None)
        yield True
    return scheduler.results()


class _EpisodeScheduler:
    """Scores and lengths of the E running episodes, and the episodes that each environment still has to play."""

    def __init__(self, num_envs: int, episodes: int, max_steps: int, env: Env):
        self._max_steps, self._env = max_steps, env
        extra = np.arange(num_envs) < episodes % num_envs
        self._remaining = episodes // num_envs + extra.astype(np.int64)  # [E]
        self._finished: list[list[Episode]] = [[] for _ in range(num_envs)]
        self._waiting = np.zeros(num_envs, bool)
        self.restart()

    @property
    def done(self) -> bool:
        """Return True if all episodes have been played."""
        return not self._remaining.any()

    @property
    def all_wait(self) -> bool:
        """Return True if every environment with episodes left waits after a truncated episode."""
        return not self.done and bool(self._waiting[self._remaining > 0].all())

    def restart(self) -> None:
        """Start an episode in every environment."""
        self._waiting[:] = False
        self._scores = np.zeros(len(self._remaining))
        self._lengths = np.zeros(len(self._remaining), np.int64)

    def count(self, timestep: TimeStep) -> list[Episode]:
        """Count one step of all environments. Return the episodes that it ended."""
        self._scores = np.where(timestep.first, 0.0, self._scores + timestep.raw_reward)
        self._lengths = np.where(timestep.first, 0, self._lengths + 1)
        self._waiting &= ~timestep.first
        cut = (self._lengths >= self._max_steps) & ~timestep.last
        ended = (timestep.last | cut) & ~self._waiting & (self._remaining > 0)
        self._waiting |= cut
        truncated = cut | (timestep.discount != 0)
        return [self._finish(env_ind, bool(truncated[env_ind])) for env_ind in np.flatnonzero(ended).tolist()]

    def running(self, env_ind: int) -> tuple[float, int]:
        """Return score and length of the environment's episode, which runs or has just ended."""
        return float(self._scores[env_ind]), int(self._lengths[env_ind])

    def results(self) -> EpisodeResults:
        return results_of(
            [episode for played in zip_longest(*self._finished) for episode in played if episode is not None],
            self._env.spec.reward_threshold,
        )

    def _finish(self, env_ind: int, truncated: bool) -> Episode:
        score, length = self.running(env_ind)
        episode = Episode(score, length, truncated, self._env.success(env_ind))
        self._finished[env_ind].append(episode)
        self._remaining[env_ind] -= 1
        return episode


def _next_seed(sequence: np.random.SeedSequence) -> int:
    """Return a new seed at each call."""
    return int(sequence.spawn(1)[0].generate_state(1)[0] >> 1)
