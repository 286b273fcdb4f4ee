"""Double-buffered environments give the same steps as alone, and step while the network infers."""

import threading

import numpy as np
import pytest
import torch

from core.agent import ActorOutput
from core.env import Env
from core.envs.atari import AtariEnv, AtariParams
from core.single_processes.actor import DoubleBufferedEnvs
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep


class Counter(Env):
    """Show seed, environment index and sum of actions in episodes of three steps; record calls on a tape."""

    def __init__(self, num_envs, tape):
        self.spec = EnvSpec("counter", ArraySpec((3,), "float32"), 0, Discrete(9))
        self._num_envs, self._tape = num_envs, tape

    def reset(self, seed):
        self._name, self._sums, self._steps = seed, np.zeros(self._num_envs), 0
        return self._timestep(first=True)

    def send(self, action):
        self._tape.append(f"send {self._name}")
        super().send(action)

    def step(self, action):
        self._tape.append(f"step {self._name}")
        again = self._steps == 3
        self._steps = 0 if again else self._steps + 1
        self._sums = self._sums * 0 if again else self._sums + action
        return self._timestep(first=again)

    def close(self):
        self._tape.append(f"close {self._name}")

    def _timestep(self, first):
        zeros, ones = np.zeros(self._num_envs, np.float32), np.ones(self._num_envs, bool)
        rows = np.stack([np.full(self._num_envs, self._name), np.arange(self._num_envs), self._sums], 1).astype(
            np.float32
        )
        return TimeStep(rows, zeros + self._steps, zeros + 1, ones & first, ones & (self._steps == 3), zeros)


class Arithmetic:
    """Choose actions by observation and count the calls since the episode began."""

    def __init__(self, tape):
        self.tape = tape

    def initial_state(self, batch_size):
        return (torch.zeros(batch_size, 1),)

    def act(self, timestep, state, exploration):
        assert torch.is_inference_mode_enabled()
        self.tape.append(f"act {int(timestep.observation[0, 0])}")
        action = ((timestep.observation.sum(1) * 7 + exploration.number) % 9).astype(np.int64)
        return ActorOutput(action, {"asked": state[0].numpy()[:, 0]}, (state[0] + 1,))


class Numbered:
    def __init__(self, number):
        self.number, self.steps = number, []

    def update(self, agent_steps, learning_steps):
        self.steps.append((agent_steps, learning_steps))

    def statistics(self):
        return {"epsilon": float(self.number)}


def make(count, num_envs=4, tape=None):
    tape = [] if tape is None else tape
    return DoubleBufferedEnvs(
        Arithmetic(tape), lambda streams, first: Counter(streams, tape), Numbered, 100, count, num_envs
    )


def test_steps_of_splits_equal_those_of_each_split_alone():
    together, alone = (
        make(2),
        [
            DoubleBufferedEnvs(
                Arithmetic([]),
                lambda streams, first: Counter(streams, []),
                lambda _, group=group: Numbered(group),
                100 + group,
                1,
                2,
            )
            for group in range(2)
        ],
    )
    for number in range(9):
        found, expected = together.step(number, number), [turns.step(number, number) for turns in alone]
        for part, streams in enumerate((slice(0, 2), slice(2, 4))):
            for name in ("before", "after"):
                assert getattr(found, name).action_mask is None
                for one, other in zip(getattr(found, name)[:6], getattr(expected[part], name)):
                    np.testing.assert_array_equal(one[streams], other)
            np.testing.assert_array_equal(found.output.action[streams], expected[part].output.action)
            np.testing.assert_array_equal(found.output.extras["asked"][streams], expected[part].output.extras["asked"])
            assert (found.state[0][streams] == expected[part].state[0]).all()
            assert (found.output.state[0][streams] == expected[part].output.state[0]).all()
    assert found.state[0].max() == 0 and number == 8  # a new episode resets the state


@pytest.mark.parametrize("splits", [1, 2])
def test_environments_may_reuse_their_arrays(splits):
    class Reusing(Counter):
        def _timestep(self, first):
            new = super()._timestep(first)
            self.told = getattr(self, "told", None) or new
            for old, field in zip(self.told[:6], new):
                old[:] = field
            return self.told

    def play(env_class):
        envs = DoubleBufferedEnvs(
            Arithmetic([]), lambda streams, first: env_class(streams, []), Numbered, 100, splits, 4
        )
        for number in range(9):
            step = envs.step(number, number)
            yield [array.tolist() for array in (*step.before[:1], *step.before[3:5], *step.after[:6])]

    assert list(play(Reusing)) == list(play(Counter))


def test_one_split_steps_while_the_other_infers():
    tape = []
    turns = make(2, tape=tape)
    turns.step(0, 0), turns.step(1, 0)
    start = ["act 100", "send 100", "act 101", "send 101"]
    turn = ["step 100", "act 100", "send 100", "step 101", "act 101", "send 101"]
    assert tape == start + turn + turn
    tape.clear()
    alone = make(1, tape=tape)
    alone.step(0, 0), alone.step(1, 0)
    assert tape == ["act 100", "send 100", "step 100"] * 2  # no action is in flight between two calls
    tape.clear()
    turns.close()
    assert tape == ["close 100", "close 101"]


def test_splits_know_their_first_environment_index():
    made = []
    DoubleBufferedEnvs(
        Arithmetic([]),
        lambda streams, first: (made.append((first, streams)), Counter(streams, []))[1],
        Numbered,
        100,
        3,
        12,
    )
    assert made == [(0, 4), (4, 4), (8, 4)]


def test_every_split_explores_and_counts_agent_steps_by_itself():
    turns = make(2)
    turns.step(5, 0), turns.step(9, 2)
    assert turns.statistics() == {"epsilon": 0.5}
    assert [group.exploration.steps for group in turns._splits] == [[(5, 0), (9, 2)]] * 2


@pytest.mark.parametrize("reporting", [0, 1])
def test_a_statistic_that_one_split_reports_is_the_mean_over_it(reporting, monkeypatch):
    turns, original = make(2), Numbered.statistics

    def statistics(self):
        return original(self) | ({"bonus": 3.0} if self.number == reporting else {})

    monkeypatch.setattr(Numbered, "statistics", statistics)
    assert turns.statistics() == {"epsilon": 0.5, "bonus": 3.0}


@pytest.mark.timeout(60)
def test_atari_can_be_closed_with_actions_in_flight():
    env, twin = (AtariEnv(AtariParams(), "pong", 2, num_threads=2) for _ in range(2))
    assert (env.reset(3).observation == twin.reset(3).observation).all()
    for number in range(5):
        action = np.array([number % 6, 2])
        env.send(action)
        for one, other in zip(env.recv(), twin.step(action)):
            np.testing.assert_array_equal(one, other)
    env.send(np.array([0, 0]))
    closing = threading.Thread(target=env.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    twin.close()
