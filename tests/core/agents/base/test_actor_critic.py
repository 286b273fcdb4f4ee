"""Acting of the actor-critics: sampled actions, what is stored, and an LSTM that the learner unrolls as the actor stepped it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from core.agents.base.actor_critic import Sampling
from core.agents.impala import Impala, ImpalaAgentParams
from core.memories.unrolls.queue import QueueMemory, QueueParams
from core.model import restart
from core.models.actor_critic import MLPAC, MLPACParams
from core.specs import ArraySpec
from core.trajectory.layout import Layout
from core.types import TimeStep
from tests.core.agents.unrolls import A, table_agent
from tests.core.tapes import RandomPlay

POLICIES = np.array([[.1, .2, .3, .4], [.25, .25, .25, .25], [.97, .01, .01, .01], [.001, .499, .3, .2]])
VALUES = np.array([1.0, -2.0, 3.0, 0.5])
CRITICAL = 21.1  # chi-square with 3 degrees of freedom is above it once in 10,000


def table(**settings):
    return table_agent(Impala, np.log(POLICIES)[:, None] + 3.0, VALUES[:, None], **settings)


def seen(states):
    """A timestep of one stream a state."""
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
    together = np.bincount(actions[:, 0] * A + actions[:, 3], minlength=A * A)  # streams are independent: 15 degrees of freedom
    assert chi_square(together, np.outer(POLICIES[0], POLICIES[3]).flatten()) < 44.3


def test_the_same_generator_gives_the_same_actions():
    first, second, other = (table().act(seen([0, 1] * 50), (), Sampling(np.random.default_rng(seed))).action for seed in (1, 1, 2))
    assert (first == second).all() and (first != other).any()


def test_without_exploration_the_likeliest_action_is_taken():
    assert table().act(seen([0, 2, 3]), (), None).action.tolist() == [3, 0, 1]


def test_evaluations_sample_or_are_greedy_as_set():
    generator = np.random.default_rng(0)
    assert isinstance(table().evaluation_exploration(3, generator), Sampling)
    assert table(evaluation="greedy").evaluation_exploration(3, generator) is None
    assert table().exploration(0, 1, 3, generator).generator is generator


def test_what_is_stored_is_what_the_network_said():
    output = table().act(seen([3, 0]), (), Sampling(np.random.default_rng(0)))
    np.testing.assert_allclose(output.extras["logits"], np.log(POLICIES[[3, 0]]) + 3)
    assert output.extras["value"].tolist() == VALUES[[3, 0]].tolist()
    assert output.extras["features"].tolist() == output.extras["logits"].tolist()
    assert output.action.dtype == np.int64 and output.state == ()


def test_unrolls_are_whole_chunks_with_the_row_they_bootstrap_from():
    agent = table(unroll_length=3)
    window = agent.window
    assert (window.length, window.stride, window.observations, window.crosses_episodes) == (3, 3, (0, 1, 2, 3), True)
    assert agent.samples_per_window == 3
    assert agent.extras == {"logits": ArraySpec((A,), "float32"), "value": ArraySpec((), "float32")}
    assert agent.feature_field == ArraySpec((A,), "float32")


# recurrent ------------------------------------------------------------------------------------------------------------
LENGTH, ENVS = 5, 3


class Acting:
    """A writer for RandomPlay through which the agent acts as an actor does, one step at a time; notes what it saw."""

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
    """A recurrent agent, what it noted while it played 30 unrolls of 3 streams, and all of them as the queue gives them."""
    play = RandomPlay(3, ENVS, frame_stack=2)
    torch.manual_seed(0)
    params = replace(ImpalaAgentParams(), unroll_length=LENGTH, batch_size=1)
    agent = Impala(params, play.spec, partial(MLPAC, MLPACParams(lstm=8), play.spec))
    agent.model.torso[1].weight.data.div_(255)  # bytes
    states = tuple(ArraySpec(tuple(part.shape[1:]), "float32") for part in agent.model.initial_state(1))
    layout = Layout.of(play.spec, {**agent.extras, "features": agent.feature_field}, capacity=40 * LENGTH * ENVS, num_actors=1,
                       num_envs=ENVS, chunk_length=LENGTH, with_priority=False, states=states)
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


def test_the_learner_unrolls_from_the_stored_state_what_the_actor_computed_step_by_step(played):
    agent, acting, batch = played
    output, _ = agent.unroll(batch.window)
    features = agent.features(batch.window)
    assert features.shape == (LENGTH, 30 * ENVS, agent.model.feature_size)
    inside = batch.window.firsts[1:-1].any(0)  # an episode starts amid the unroll
    assert inside.sum() > 10 and (~inside).sum() > 10 and batch.window.firsts[0].any()
    for b, (stream, serial) in enumerate(zip(*batch.keys)):
        for t in range(LENGTH):
            row = {name: field[stream] for name, field in acting.rows[serial + t].items()}
            assert np.array_equal(batch.window.extras["logits"][t, b], row["logits"])
            np.testing.assert_allclose(output.logits[t, b].detach(), row["logits"], atol=1e-5)
            np.testing.assert_allclose(output.value[t, b].detach(), row["value"], atol=1e-5)
            np.testing.assert_allclose(output.features[t, b].detach(), row["features"], atol=1e-5)
            np.testing.assert_allclose(features[t, b], row["features"], atol=1e-5)


def test_an_unroll_amid_an_episode_needs_the_state_it_started_with(played):
    agent, acting, batch = played
    window = batch.window
    for b, (stream, serial) in enumerate(zip(*batch.keys)):
        assert all(torch.equal(stored[b], state[stream]) for stored, state in zip(window.states, acting.states[serial]))
    amid = ~window.firsts[0]
    forgetful = agent.features(window._replace(states=tuple(torch.zeros_like(part) for part in window.states)))
    apart = (forgetful - window.extras["features"][:-1]).abs().amax(-1)[0]  # [B] of the first row
    assert (apart[amid] > 1e-3).all() and (apart[~amid] < 1e-5).all()
