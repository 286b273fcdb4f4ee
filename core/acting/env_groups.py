"""An actor's environments in groups that take turns: while the emulators of one group step, the network answers another."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from core.agent import ActorOutput, Agent, Exploration
from core.env import Env
from core.model import restart
from core.types import State, TimeStep


class Step(NamedTuple):
    """One step of all streams, those of the first group first."""

    before: TimeStep
    output: ActorOutput
    after: TimeStep
    state: State         # that the actions were chosen with


class Group:
    """Some of the streams; `ask` chooses their next actions and sends them to the emulators."""

    def __init__(self, agent: Agent, env: Env, exploration: Exploration, timestep: TimeStep, lap: Callable[[str], None]):
        self._agent, self._env, self.exploration, self._lap = agent, env, exploration, lap
        self._timestep, self._initial = timestep, agent.initial_state(len(timestep.first))
        self._state = self._initial

    def ask(self) -> None:
        state = restart(self._state, self._timestep.first, self._initial)
        self._asked = self._timestep, self._agent.act(self._timestep, state, self.exploration), state
        self._lap("forward")
        self._env.send(self._asked[1].action)
        self._lap("environment")

    def answer(self) -> Step:
        """Waits for the emulators."""
        before, output, state = self._asked
        self._timestep, self._state = self._env.recv(), output.state
        self._lap("environment")
        return Step(before, output, self._timestep, state)


class DoubleBufferedEnvs:
    """`count` groups of equally many of the streams, seeded one after another.

    With one group a step is chosen, taken and returned; with more, each call returns the step that was sent to the emulators in the call
    before, and sends the next: its parameters are one step older.

    `make_env(streams, first)`, of so many streams of the actor from `first` on, and `exploration(group)` make what a group has of its own;
    `lap` is told what was done, as core/metrics/profiler.py wants it.
    """

    def __init__(self, agent: Agent, make_env: Callable[[int, int], Env], exploration: Callable[[int], Exploration], seed: int, count: int,
                 num_envs: int, lap: Callable[[str], None] = lambda phase: None):
        streams = num_envs // count
        self._envs = [make_env(streams, group * streams) for group in range(count)]
        self._groups = [Group(agent, env, exploration(number), env.reset(seed + number), lap) for number, env in enumerate(self._envs)]
        self._sent = False

    def step(self, agent_steps: int) -> Step:
        for group in self._groups:
            group.exploration.update(agent_steps)
        if len(self._groups) == 1:
            self._groups[0].ask()
            return self._groups[0].answer()
        for group in self._groups if not self._sent else ():
            group.ask()
        self._sent, steps = True, []
        for group in self._groups:
            steps.append(group.answer())
            group.ask()
        return joined(steps)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def statistics(self) -> dict[str, float]:
        """Means over the groups' explorations."""
        each = [group.exploration.statistics() for group in self._groups]
        return {name: sum(values[name] for values in each) / len(each) for name in each[0]}


def joined(steps: Sequence[Step]) -> Step:
    def along(parts: Sequence[TimeStep]) -> TimeStep:
        return TimeStep._make(map(np.concatenate, zip(*parts)))

    before, outputs, after, states = zip(*steps)
    extras = {name: np.concatenate([output.extras[name] for output in outputs]) for name in outputs[0].extras}
    output = ActorOutput(np.concatenate([output.action for output in outputs]), extras, _cat([output.state for output in outputs]))
    return Step(along(before), output, along(after), _cat(states))


def _cat(states: Sequence[State]) -> State:
    return tuple(map(torch.cat, zip(*states)))
