"""Actor-critics sample actions, store what the network computed, and unroll an LSTM as the actor stepped it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from core.agents.base.actor_critic import Sampling
from core.agents.impact import Impact
from core.agents.impala import Impala, ImpalaAgentParams
from core.agents.ppo import PPO
from core.memories.unrolls.queue import QueueMemory, QueueParams
from core.models.actor_critic import MLPAC, MLPACParams
from core.specs import ArraySpec
from core.trajectory.ring_buffer import Layout
from core.types import TimeStep, restart
from tests.core.agents.unrolls import SPEC, A, Table, random_unrolls, table_agent
from tests.core.tapes import RandomPlay

POLICIES = np.array(
    [[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01], [0.001, 0.499, 0.3, 0.2]]
)
VALUES = np.array([1.0, -2.0, 3.0, 0.5])
CRITICAL = 21.1  # a chi-square variable with 3 degrees of freedom exceeds this once in 10,000


def table(**settings):
    return table_agent(Impala, np.log(POLICIES)[:, None] + 3.0, VALUES[:, None], **settings)


def seen(states):
    """Return a time step with one environment per state."""
    return TimeStep(np.array(states)[:, None], *[np.zeros(len(states))] * 5)


def chi_square(counts, probabilities):
    expected = counts.sum() * np.array(probabilities)
    return float(((counts - expected) ** 2 / expected).sum())


def test_sampled_actions_follow_the_policy():
    agent, sampling = table(), Sampling(np.random.default_rng(0))
    actions = agent.act(seen([0, 1, 2, 3] * 20_000), (), sampling).action.reshape(-1, 4)
    for state, policy in enumerate(POLICIES):
        counts = np.bincount(actions[:, state], minlength=A)
        assert chi_square(counts, policy) < CRITICAL
        assert chi_square(counts, POLICIES[(state + 1) % 4]) > CRITICAL
    # environments are independent: 15 degrees of freedom
    together = np.bincount(actions[:, 0] * A + actions[:, 3], minlength=A * A)
    assert chi_square(together, np.outer(POLICIES[0], POLICIES[3]).flatten()) < 44.3


def test_a_seed_determines_the_actions():
    first, second, other = (
        table().act(seen([0, 1] * 50), (), Sampling(np.random.default_rng(seed))).action for seed in (1, 1, 2)
    )
    assert (first == second).all() and (first != other).any()


def test_without_exploration_the_most_likely_action_is_taken():
    assert table().act(seen([0, 2, 3]), (), None).action.tolist() == [3, 0, 1]


def test_evaluations_sample_or_are_greedy_as_configured():
    generator = np.random.default_rng(0)
    assert isinstance(table().evaluation_exploration(3, generator), Sampling)
    assert table(evaluation="greedy").evaluation_exploration(3, generator) is None
    assert table().exploration(0, 1, 3, generator).generator is generator


def test_stored_extras_equal_the_networks_output():
    output = table().act(seen([3, 0]), (), Sampling(np.random.default_rng(0)))
    np.testing.assert_allclose(output.extras["logits"], np.log(POLICIES[[3, 0]]) + 3)
    assert output.extras["value"].tolist() == VALUES[[3, 0]].tolist()
    assert output.extras["features"].tolist() == output.extras["logits"].tolist()
    assert output.action.dtype == np.int64 and output.state == ()


def test_unrolls_are_whole_chunks_with_a_bootstrap_step():
    agent = table(unroll_length=3)
    window = agent.window
    assert (window.length, window.stride, window.observations) == (3, 3, (0, 1, 2, 3))
    assert agent.samples_per_window == 3
    assert agent.extras == {"logits": ArraySpec((A,), "float32"), "value": ArraySpec((), "float32")}
    assert agent.feature_field == ArraySpec((A,), "float32")


# recurrent --------------------------------------------------------------------------------------------------------
LENGTH, ENVS = 5, 3


class Acting:
    """Write RandomPlay's steps with the agent acting on them one at a time, and record its outputs and states."""

    def __init__(self, agent, writer):
        self.agent, self.writer = agent, writer
        self.initial = self.state = agent.model.initial_state(ENVS)
        self.rows, self.states = [], []

    def append(self, before, actions, after, *others):
        self.state = restart(self.state, before.first, self.initial)
        output = self.agent.act(before, self.state, None)
        self.rows.append(output.extras)
        self.states.append(self.state)
        published = self.writer.append(before, actions, after, output.extras, self.state)
        self.state = output.state
        return published


@pytest.fixture
def played():
    """Return a recurrent agent, its records of 30 unrolls in 3 environments, and these unrolls as a batch."""
    play = RandomPlay(3, ENVS, frame_stack=2)
    torch.manual_seed(0)
    params = replace(ImpalaAgentParams(), unroll_length=LENGTH, batch_size=1)
    agent = Impala(params, play.spec, partial(MLPAC, MLPACParams(lstm=8), play.spec))
    agent.model.torso[1].weight.data.div_(255)  # observations are bytes
    states = tuple(ArraySpec(tuple(part.shape[1:]), "float32") for part in agent.model.initial_state(1))
    layout = Layout.of(
        play.spec,
        {**agent.extras, "features": agent.feature_field},
        capacity=40 * LENGTH * ENVS,
        num_actors=1,
        num_envs=ENVS,
        chunk_length=LENGTH,
        with_priority=False,
        states=states,
    )
    memory = QueueMemory(QueueParams(capacity=30 * ENVS), layout, agent.window, 0)
    acting = Acting(agent, memory.writer(0))
    play.play(acting, 30 * LENGTH)
    batch = memory.sample(30 * ENVS)
    assert batch is not None
    return agent, acting, batch


def test_the_actor_returns_the_recurrent_state_of_one_step(played):
    agent, acting, _ = played
    timestep = RandomPlay(4, ENVS, frame_stack=2).timestep
    with torch.inference_mode():
        expected, (h, c) = agent.model(torch.from_numpy(timestep.observation), acting.state)
    output = agent.act(timestep, acting.state, None)
    assert torch.equal(output.state[0], h) and torch.equal(output.state[1], c)
    np.testing.assert_array_equal(output.extras["logits"], expected.logits.numpy())
    assert not torch.equal(output.state[0], acting.state[0])


def test_the_learners_unroll_equals_the_actors_single_steps(played):
    agent, acting, batch = played
    output, _ = agent.unroll(batch.window)
    features = agent.features(batch.window)
    assert features.shape == (LENGTH, 30 * ENVS, agent.model.feature_size)
    inside = batch.window.firsts[1:-1].any(0)  # an episode starts within the unroll
    assert inside.sum() > 10 and (~inside).sum() > 10 and batch.window.firsts[0].any()
    for b, (stream, serial) in enumerate(zip(*batch.keys)):
        for t in range(LENGTH):
            row = {name: field[stream] for name, field in acting.rows[serial + t].items()}
            assert np.array_equal(batch.window.extras["logits"][t, b], row["logits"])
            np.testing.assert_allclose(output.logits[t, b].detach(), row["logits"], atol=1e-5)
            np.testing.assert_allclose(output.value[t, b].detach(), row["value"], atol=1e-5)
            np.testing.assert_allclose(output.features[t, b].detach(), row["features"], atol=1e-5)
            np.testing.assert_allclose(features[t, b], row["features"], atol=1e-5)


def test_an_unroll_within_an_episode_needs_its_stored_state(played):
    agent, acting, batch = played
    window = batch.window
    for b, (stream, serial) in enumerate(zip(*batch.keys)):
        assert all(torch.equal(stored[b], state[stream]) for stored, state in zip(window.states, acting.states[serial]))
    amid = ~window.firsts[0]
    forgetful = agent.features(window._replace(states=tuple(torch.zeros_like(part) for part in window.states)))
    apart = (forgetful - window.extras["features"][:-1]).abs().amax(-1)[0]  # [B], of the first step
    assert (apart[amid] > 1e-3).all() and (apart[~amid] < 1e-5).all()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [Impala, Impact, PPO])
def test_an_action_that_became_much_likelier_skips_no_update(kind, last):
    batch, logits, values = random_unrolls(0, streams=10)
    window = batch.window
    t, b = (window.lasts[:-1] == last).nonzero()[0]
    window.extras["logits"][t, b, :] = 0
    window.extras["logits"][t, b, window.actions[t, b]] = -1_000  # pi / mu is no float64
    agent = table_agent(kind, logits, values, batch_size=10)
    before = agent.model.logits.detach().clone()
    assert not agent.learn(batch).skipped
    assert torch.isfinite(agent.model.logits).all() and not torch.equal(agent.model.logits, before)


class DropoutTable(Table):
    """Drop half of the logits, which are the features too, in training mode."""

    def forward(self, observation, state):
        output, state = super().forward(observation, state)
        dropped = torch.nn.functional.dropout(output.logits, 0.5, self.training)
        return output._replace(logits=dropped, features=dropped), state


@pytest.mark.parametrize("agent_class", [Impala, Impact, PPO])
def test_dropout_is_active_in_updates_only(agent_class):
    batch, logits, values = random_unrolls(seed=1)
    params = agent_class.Params(unroll_length=len(values) - 1, batch_size=values.shape[1])
    agent = agent_class(params, SPEC, lambda: DropoutTable(logits, values))
    timestep = seen(range(values.size))
    agent.init_learner()
    acted = agent.act(timestep, (), None).extras["logits"]
    np.testing.assert_array_equal(acted, agent.model.logits.detach())
    agent.learn(batch)
    assert agent.model.training
    assert (agent.unroll(batch.window)[0].logits == 0).float().mean() > 0.4
    assert (agent.features(batch.window) != 0).all()
    np.testing.assert_array_equal(agent.act(timestep, (), None).extras["logits"], agent.model.logits.detach())
