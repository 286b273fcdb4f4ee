"""DQN's targets, updates and exploration equal hand-made numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from core.agents.dqn import DQN, DQNParams
from core.model import Model
from core.ops.actions import ladder
from core.runtime.run_state import RateLimiter, RateLimiterParams, RunCounters
from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from core.types import Batch, SampleIds, TimeStep, TransitionBatch, Window

SPEC = EnvSpec("numbers", ArraySpec((1,), "float32"), 0, Discrete(2))


class Linear(Model):
    """Compute Q(s, a) = w_a s."""

    output_kind = "q"
    observations = "vector"
    first = (1.0, 2.0)

    def __init__(self):
        super().__init__(None, SPEC)
        self.weight = nn.Parameter(torch.tensor(self.first))

    def forward(self, observation, state=()):
        return observation * self.weight, state


def make_agent(kind=DQN, **settings):
    agent = kind(
        replace(DQNParams(optimizer="adam", learning_rate=0.1, clip_norm=0.0, gamma=0.9, n_step=2), **settings),
        SPEC,
        Linear,
    )
    agent.init_learner()
    return agent


def make_batch(observation, final, action, rewards, discounts, lasts, weights=(1.0,)):
    columns = len(observation)
    window = Window(
        torch.tensor([[[value] for value in observation], [[value] for value in final]]),
        torch.zeros(3, columns, dtype=torch.bool),
        torch.tensor(lasts).T,
        torch.tensor(action)[None].expand(3, -1),
        torch.tensor(rewards).T,
        torch.tensor(discounts).T,
        {},
    )
    return Batch(window, SampleIds(np.zeros(columns, np.int64), np.arange(columns)), torch.tensor(weights))


ONE = ([2.0], [3.0], [0], [[1.0, 10.0, 0.0]], [[1.0, 1.0, 1.0]], [[False, False, False]])


def spread(agent):
    """Set the online and target networks apart, so that tests show which one selects and which one evaluates."""
    agent.learn(make_batch(*ONE))
    agent.model.weight.data = torch.tensor([5.0, 2.0])
    agent.target.weight.data = torch.tensor([1.0, 2.0])


def td_error(agent, batch):
    return float(agent.learn(batch).priorities[0])


@pytest.mark.parametrize(
    ("double_q", "discount", "ends", "target"),
    [
        (True, 1.0, False, 10 + 0.81 * 3),  # the online network selects action 0 at s = 3, the target values it at 3
        (False, 1.0, False, 10 + 0.81 * 6),
        (True, 0.0, True, 1),
        (True, 1.0, True, 1 + 0.9 * 3),
    ],
    ids=["double", "plain", "terminated", "truncated"],
)
def test_td_errors_equal_numbers_by_hand(double_q, discount, ends, target):
    """The rewards of two steps are 1 and 10, gamma is 0.9, and Q(s, a) is 5 * 2."""
    agent = make_agent(double_q=double_q)
    spread(agent)
    batch = make_batch([2.0], [3.0], [0], [[1.0, 10.0, 0.0]], [[discount, 1.0, 1.0]], [[False, ends, False]])
    assert td_error(agent, batch) == pytest.approx(abs(target - 10), rel=1e-5)


@pytest.mark.parametrize(
    "loss, gradient", [("huber", lambda error: np.clip(error, -1, 1)), ("squared", lambda error: error)]
)
def test_the_gradient_equals_the_one_derived_by_hand(loss, gradient):
    agent = make_agent(loss=loss, double_q=False)
    batch = make_batch(
        [2.0, 1.0],
        [3.0, 0.0],
        [0, 1],
        [[1.0, 10.0, 0.0], [0.0, 0.3, 0.0]],
        [[1.0] * 3] * 2,
        [[False] * 3] * 2,
        (0.5, 1.0),
    )
    found = torch.autograd.grad(agent.loss(batch).loss, agent.model.weight)[0]
    first, second = 2.0 - (10 + 0.81 * 6), 2.0 - 0.27  # Q - y
    expected = [0.5 * gradient(first) * 2 / 2, gradient(second) * 1 / 2]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


class Augmented(DQN):
    """Draw the inputs at random, and read them again for an auxiliary loss."""

    def learning_inputs(self, window):
        transitions = super().learning_inputs(window)
        return transitions._replace(observation=transitions.observation * torch.rand(1))

    def loss(self, batch):
        loss = super().loss(batch)
        self.read = [self.inputs_and_target_outputs(batch).inputs.observation for _ in range(2)]
        return loss


def test_an_auxiliary_loss_reads_the_inputs_of_the_loss():
    agent = make_agent(kind=Augmented)
    agent.learn(make_batch(*ONE))
    agent.model.weight.data, agent.target.weight.data = torch.tensor([5.0, 2.0]), torch.zeros(2)
    error = td_error(agent, make_batch(*ONE))  # |5 s - 10|, with the random s
    first, second = agent.read
    assert first is second and error == pytest.approx(abs(5 * float(first) - 10), rel=1e-5)


def test_the_target_network_is_copied_on_time_or_moves_softly():
    hard, soft = make_agent(target_update_period=2), make_agent(target_update_period=1, target_update_tau=0.25)
    for agent in (hard, soft):
        agent.learn(make_batch(*ONE))
    assert hard.target.weight.tolist() == list(Linear.first)
    moved = soft.model.weight.detach() - torch.tensor(Linear.first)
    assert (soft.target.weight - torch.tensor(Linear.first)).tolist() == pytest.approx(
        (0.25 * moved).tolist(), abs=1e-6
    )
    hard.learn(make_batch(*ONE))
    assert hard.target.weight.tolist() == hard.model.weight.tolist()


def test_a_non_finite_loss_changes_nothing():
    agent = make_agent()
    agent.learn(make_batch(*ONE))
    before = agent.model.weight.detach().clone()
    output = agent.learn(make_batch([2.0], [3.0], [0], [[float("nan"), 0.0, 0.0]], [[1.0] * 3], [[False] * 3]))
    assert output.skipped and output.priorities is None
    assert torch.equal(agent.model.weight, before)


@pytest.mark.parametrize("settings", [{"clip_norm": 0.5}, {"clip_value": 0.5}])
def test_clipping_bounds_the_gradient(settings):
    agent = make_agent(loss="squared", **settings)
    agent.learn(make_batch(*ONE))
    gradient = agent.model.weight.grad
    assert float(gradient.norm() if "clip_norm" in settings else gradient.abs().max()) == pytest.approx(0.5, rel=1e-3)


def test_initial_priorities_are_td_errors_of_the_actors_values():
    window = make_batch(*ONE).window._replace(
        observations=torch.empty(0),
        extras={"q_taken": torch.tensor([[4.0], [0.0], [0.0]]), "q_max": torch.tensor([[0.0], [0.0], [6.0]])},
    )
    assert make_agent().initial_priorities(window).tolist() == pytest.approx([abs(10 + 0.81 * 6 - 4)])


class ColumnBootstrap(DQN):
    def bootstrap(self, transitions, next_output, output=None):
        return next_output.amax(1, keepdim=True), transitions.returns


def test_targets_that_would_broadcast_are_an_error():
    """The targets [B, B] taught each window the mean of all."""
    agent = ColumnBootstrap(make_agent().params, SPEC, Linear)
    agent.init_learner()
    batch = make_batch([2.0, 1.0], [3.0, 0.0], [0, 1], [[1.0, 10.0, 0.0]] * 2, [[1.0] * 3] * 2, [[False] * 3] * 2)
    with pytest.raises(ValueError, match=r"must be \[B\] of one shape"):
        agent.learn(batch._replace(weights=torch.ones(2)))
    agent = make_agent()
    with pytest.raises(ValueError, match=r"must be \[B\] of one shape"):
        agent.learn(batch._replace(weights=torch.ones(2, 1)))
    assert agent.learn(batch._replace(weights=torch.ones(2))).priorities.shape == (2,)


class LongWindows(DQN):
    """Extend DQN by a loss that reads more steps than the return."""

    window = WindowSpec(4, (0, 1, 2, 4))


def test_longer_windows_have_the_same_returns_and_initial_priorities():
    """They were returns of all steps, which bootstrapped from the window's second observation."""
    agent, longer = make_agent(), LongWindows(make_agent().params, SPEC, Linear)
    longer.init_learner()
    window = make_batch(*ONE).window
    padded = Window(
        torch.tensor([[[2.0]], [[7.0]], [[3.0]], [[8.0]]]),
        *(torch.cat([field, field[:2]]) for field in window[1:6]),
        {"q_taken": torch.tensor([[4.0], [0.0], [0.0], [9.0], [9.0]]), "q_max": torch.arange(5.0)[:, None]},
    )
    short = window._replace(extras={name: field[:3] for name, field in padded.extras.items()})
    assert longer.initial_priorities(padded) == agent.initial_priorities(short)
    expected, found = agent.n_step_transitions(window, 0.9, 2), longer.n_step_transitions(padded, 0.9, 2)
    assert [*map(str, found)] == [*map(str, expected)]
    with pytest.raises(ValueError, match=r"LongWindows\.window has no observation 3, which 3-step returns need"):
        longer.n_step_transitions(padded, 0.9, 3)


class ShrinkingWindows(DQN):
    """Anneal n by asking for shorter windows, which the memory does not hear of."""

    steps = 2

    @property
    def window(self):
        return WindowSpec.transition(self.steps)


def test_windows_of_another_length_than_the_agent_asks_for_are_refused():
    """They were one-step returns, which bootstrapped from the observation two steps later."""
    agent, window = ShrinkingWindows(make_agent().params, SPEC, Linear), make_batch(*ONE).window
    agent.n_step_transitions(window, 0.9)
    agent.steps = 1
    with pytest.raises(ValueError, match=r"length=1.* the windows have 2 steps and 2 observations"):
        agent.n_step_transitions(window, 0.9)


def test_a_model_with_too_few_values_is_an_error():
    """The missing action would never be taken."""
    agent = DQN(DQNParams(), replace(SPEC, action=Discrete(3)), Linear)
    step = TimeStep(np.array([[2.0], [-2.0]], np.float32), *[np.zeros(2)] * 5)
    with pytest.raises(ValueError, match="the model gives values of 2 actions, and there are 3"):
        agent.act(step, (), None)


def test_some_transitions_have_their_own_extras():
    fields = [torch.arange(4.0) + number for number in range(5)]
    batch = TransitionBatch(*fields, extras={"weight": torch.arange(4.0) + 9})
    some = batch.select(slice(1, 3))
    assert [field.tolist() for field in some[:5]] == [[1.0 + number, 2.0 + number] for number in range(5)]
    assert some.extras["weight"].tolist() == [10.0, 11.0] and some.legal is some.next_legal is None
    assert batch.select(None) is batch


def test_environments_of_all_actors_share_one_epsilon_ladder():
    agent = make_agent(exploration="ladder", apex_epsilon_base=0.5, apex_epsilon_alpha=3.0)
    generator = np.random.default_rng(0)
    rungs = np.concatenate([agent.exploration(index, 2, 4, generator).epsilon for index in range(2)])
    assert sorted(rungs, reverse=True) == pytest.approx([0.5 ** (1 + 3 * i / 7) for i in range(8)])


def test_epsilon_falls_from_the_first_update_on():
    agent = make_agent(exploration_epsilon_start=0.8, exploration_epsilon_end=0.2, exploration_epsilon_steps=100)
    exploration = agent.exploration(0, 1, 1, np.random.default_rng(0))
    epsilons = []
    for agent_steps in (0, 30, 40, 90, 500):
        limiter = RateLimiter(RateLimiterParams(min_replay_size=40), RunCounters(1, 1))
        exploration.update(agent_steps, limiter.learning_steps(agent_steps))
        epsilons.append(float(exploration.epsilon[0]))
    assert epsilons == pytest.approx([0.8, 0.8, 0.8, 0.5, 0.2])


def test_epsilon_falls_to_the_ladder_or_begins_there():
    rungs, settings = ladder(4, 0.4, 7.0), {"exploration_epsilon_start": 1.0, "exploration_epsilon_steps": 100}
    for exploration, shares in (("linear-ladder", (0.0, 0.25, 1.0)), ("ladder", (1.0, 1.0, 1.0))):
        own = make_agent(exploration=exploration, **settings).exploration(0, 1, 4, np.random.default_rng(0))
        for learning_steps, share in zip((0, 25, 300), shares):
            own.update(1_000, learning_steps)
            assert own.epsilon == pytest.approx(1.0 + (rungs - 1.0) * share)


def test_greedy_acting_takes_the_best_action():
    step = TimeStep(np.array([[2.0], [-2.0]], np.float32), *[np.zeros(2)] * 5)
    output = make_agent().act(step, (), None)
    assert output.action.tolist() == [1, 0]
    assert output.extras["q_taken"].tolist() == output.extras["q_max"].tolist() == [4.0, -2.0]
