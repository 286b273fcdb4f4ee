"""Dropout and batch normalisation of agents of action values work in updates only, and noisy layers when they act."""

import numpy as np
from torch import nn

from core.agents.dqn import DQN, DQNParams
from core.model import Model
from core.models.layers.noisy_linear import NoisyLinear
from core.specs import ArraySpec, Discrete, EnvSpec
from tests.core.agents.control_agents import timestep
from tests.core.agents.test_dqn import ONE, make_batch

SPEC = EnvSpec("numbers", ArraySpec((1,), "float32"), 0, Discrete(2))
LAYERS = {
    "batch normalisation": lambda: nn.BatchNorm1d(1),
    "dropout": lambda: nn.Dropout(0.5),
    "noise": lambda: NoisyLinear(1, 1),
}


class Regularized(Model):
    """Compute action values behind a layer of the kind that a test is about."""

    output_kind, observations = "q", "vector"

    def __init__(self, layer):
        super().__init__(None, SPEC)
        self.layers = nn.Sequential(LAYERS[layer](), nn.Linear(1, 2))

    def forward(self, observation, state=()):
        return self.layers(observation), state


def make_agent(layer):
    agent = DQN(
        DQNParams(n_step=2, exploration_epsilon_start=0.0, exploration_epsilon_end=0.0),
        SPEC,
        lambda: Regularized(layer),
    )
    exploration = agent.exploration(0, 1, 4, np.random.default_rng(0))
    exploration.update(0, 0)
    return agent, exploration


def acted(agent, exploration, observations=(1.0, 2.0, 3.0, 4.0)):
    observation = np.array(observations, np.float32)[:, None]
    return agent.act(timestep(observation), (), exploration).extras["q_max"]


def test_training_actors_act_without_dropout_and_batch_statistics():
    for layer in ("batch normalisation", "dropout"):
        agent, exploration = make_agent(layer)
        greedy = acted(agent, None)
        for _ in range(5):
            np.testing.assert_array_equal(acted(agent, exploration), greedy)
        # one environment, of which no variance is computed
        np.testing.assert_array_equal(acted(agent, exploration, [1.0]), greedy[:1])


def test_training_actors_act_with_noise():
    agent, exploration = make_agent("noise")
    greedy = acted(agent, None)
    assert not np.array_equal(acted(agent, exploration), greedy)
    np.testing.assert_array_equal(acted(agent, None), greedy)


def test_updates_have_batch_statistics_after_the_same_agent_has_acted():
    agent, exploration = make_agent("batch normalisation")
    agent.init_learner()
    batch = make_batch(*(field * 3 for field in ONE), weights=(1.0, 1.0, 1.0))
    for seen in (exploration, None, exploration):
        acted(agent, seen)
        agent.learn(batch)
        assert agent.model.layers[0].training
    assert int(agent.model.layers[0].num_batches_tracked) == 6  # double Q-learning computes it twice an update
