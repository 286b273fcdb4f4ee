"""Step an actor's environments in splits that take turns.

While one split is emulated, the network chooses actions for another. This is the double-buffered sampling of Sample
Factory (Petrenko et al. 2020).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from core.agent import ActorOutput, Agent, Exploration
from core.env import Env
from core.model import restart
from core.types import State, TimeStep


class EnvStep(NamedTuple):
    """One step of all environments, those of the first split first."""

    before: TimeStep
    output: ActorOutput
    after: TimeStep
    # The recurrent state that the actions were chosen with.
    state: State


class EnvSplit:
    """Some of an actor's environments.

    `send_actions` chooses actions and sends them; `receive_steps` waits for the steps that they lead to.
    """

    def __init__(
        self, agent: Agent, env: Env, exploration: Exploration, timestep: TimeStep, mark_phase: Callable[[str], None]
    ):
        self._agent, self._env, self.exploration, self._mark_phase = agent, env, exploration, mark_phase
        self._timestep, self._initial_state = timestep, agent.initial_state(len(timestep.first))
        self._state = self._initial_state

    def send_actions(self) -> None:
        state = restart(self._state, self._timestep.first, self._initial_state)
        self._sent = self._timestep, self._agent.act(self._timestep, state, self.exploration), state
        self._mark_phase("forward")
        self._env.send(self._sent[1].action)
        self._mark_phase("environment")

    def receive_steps(self) -> EnvStep:
        before, output, state = self._sent
        self._timestep, self._state = self._env.recv(), output.state
        self._mark_phase("environment")
        return EnvStep(before, output, self._timestep, state)


class DoubleBufferedEnvs:
    """An actor's environments in `num_splits` splits of equal size, seeded one after another.

    With one split, `step` chooses actions, takes them and returns the result. With more, `step` returns the result of
    the actions that the previous call sent, and sends the next ones. Its parameters are therefore one step older.

    Args:
        make_env: makes the environments of a split from their number and the index of the first one among the actor's.
        exploration: function of a split's index.
        mark_phase: is called with the name of each finished phase (core/metrics/profiler.py).
    """

    def __init__(
        self,
        agent: Agent,
        make_env: Callable[[int, int], Env],
        exploration: Callable[[int], Exploration],
        seed: int,
        num_splits: int,
        num_envs: int,
        mark_phase: Callable[[str], None] = lambda phase: None,
    ):
        size = num_envs // num_splits
        self._envs = [make_env(size, split * size) for split in range(num_splits)]
        self._splits = [
            EnvSplit(agent, env, exploration(split), env.reset(seed + split), mark_phase)
            for split, env in enumerate(self._envs)
        ]
        self._has_sent = False

    def step(self, agent_steps: int, learning_steps: int) -> EnvStep:
        """Step every environment once. Explorations follow the steps of the run, as `Exploration.update` has them."""
        for split in self._splits:
            split.exploration.update(agent_steps, learning_steps)
        if len(self._splits) == 1:
            self._splits[0].send_actions()
            return self._splits[0].receive_steps()
        if not self._has_sent:
            for split in self._splits:
                split.send_actions()
            self._has_sent = True
        steps = []
        for split in self._splits:
            steps.append(split.receive_steps())
            split.send_actions()
        return concatenate_steps(steps)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def statistics(self) -> dict[str, float]:
        """Return the means of the splits' exploration statistics."""
        statistics = [split.exploration.statistics() for split in self._splits]
        return {name: sum(values[name] for values in statistics) / len(statistics) for name in statistics[0]}


def concatenate_steps(steps: Sequence[EnvStep]) -> EnvStep:
    def concatenate_timesteps(timesteps: Sequence[TimeStep]) -> TimeStep:
        fields = zip(*timesteps)
        return TimeStep._make(None if field[0] is None else np.concatenate(field) for field in fields)

    def concatenate_states(states: Sequence[State]) -> State:
        return tuple(map(torch.cat, zip(*states)))

    before, outputs, after, states = zip(*steps)
    extras = {name: np.concatenate([output.extras[name] for output in outputs]) for name in outputs[0].extras}
    output = ActorOutput(
        np.concatenate([output.action for output in outputs]),
        extras,
        concatenate_states([output.state for output in outputs]),
    )
    return EnvStep(concatenate_timesteps(before), output, concatenate_timesteps(after), concatenate_states(states))
