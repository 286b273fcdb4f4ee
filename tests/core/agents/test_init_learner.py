"""`init_learner` alone builds the learner's state, whatever is read of an agent before or afterwards."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.learning.optimizer import Optimizer
from core.types import TimeStep
from tests.core import resident_agents
from tests.core.agents.unrolls import differences
from tests.core.learning import test_staged_update

UNROLLS = {
    name: test_staged_update.AGENTS[name] for name in ("impala", "impact", "impact with LSTM", "ppo with LSTM", "pqn")
}
REPLAYING = ("dqn", "rainbow", "iqn", "btr", "r2d2", "ddpg", "d4pg", "td3", "sac")  # one of each class and kind
MAKERS = {
    **dict.fromkeys(REPLAYING, resident_agents.make_agent),
    **dict.fromkeys(UNROLLS, test_staged_update.make_agent),
}
ENVS = 3


def read_everything(agent):
    """Act once, and read whatever an actor, a memory or a checkpoint reads."""
    numbers, first = np.zeros(ENVS, np.float32), np.ones(ENVS, bool)
    observation = np.zeros((ENVS, *agent.spec.observation_shape), agent.spec.frame.dtype)
    agent.act(TimeStep(observation, numbers, numbers, first, ~first, numbers), agent.initial_state(ENVS), None)
    return agent.window, agent.extras, agent.device, agent.model


@pytest.mark.parametrize("name", MAKERS)
def test_an_agent_that_acts_has_no_learner(name, monkeypatch):
    agent_class = (resident_agents.AGENTS | UNROLLS)[name][0]
    with monkeypatch.context() as patch:
        patch.setattr(agent_class, "init_learner", lambda agent: None)
        agent = MAKERS[name](name)
    read_everything(agent)
    found = {key for key, value in vars(agent).items() if type(value).__module__.startswith(("core.learning", "torch"))}
    assert found <= {"device"} and not hasattr(agent, "target")
    with pytest.raises(AttributeError):
        agent.state_dict()


@pytest.mark.parametrize("name", resident_agents.AGENTS)
def test_every_update_reports_loss_gradient_and_learning_rate(name):
    agent = resident_agents.make_agent(name)
    statistics = agent.learn(resident_agents.shared_memory(agent).sample(16)).statistics
    assert {"loss", "grad_norm", "lr"} <= statistics.keys()
    assert float(statistics["lr"]) == pytest.approx(getattr(agent.params, "critic_learning_rate", 1e-3))


@pytest.mark.parametrize("name", MAKERS)
def test_every_learning_rate_can_follow_the_whole_run(name):
    agent = MAKERS[name](name)
    agent.params = replace(agent.params, lr_schedule="linear", lr_schedule_updates=None)
    agent.init_learner()
    agent.run_progress = 0.75
    optimizers = [part for part in agent.checkpoint_parts().values() if isinstance(part, Optimizer)]
    assert optimizers
    for optimizer in optimizers:
        assert optimizer.next_lr == pytest.approx(optimizer._params.learning_rate / 4)


@pytest.mark.parametrize("name", MAKERS)
def test_every_update_lets_the_model_normalise_by_what_was_learnt_from(name, monkeypatch):
    """These are the observations in which actions were chosen, without the last, which returns bootstrap from."""
    agent, seen, unrolls = MAKERS[name](name), [], name in UNROLLS
    monkeypatch.setattr(agent.model, "update_normalization", seen.append)
    batch = test_staged_update.make_batch(agent, 0) if unrolls else resident_agents.shared_memory(agent).sample(16)
    agent.learn(batch)
    (observations,) = seen
    assert torch.equal(observations, batch.window.observations[:-1].flatten(0, 1))


@pytest.mark.parametrize("name", MAKERS)
def test_reading_an_agent_draws_no_numbers_and_changes_nothing(name):
    agent = MAKERS[name](name)
    read_everything(agent)
    before, random = deepcopy(agent.state_dict()), torch.get_rng_state()
    read_everything(agent)
    assert not differences(before, agent.state_dict()) and torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("name", MAKERS)
def test_the_model_draws_its_weights_first_and_the_target_copies(name):
    agent = MAKERS[name](name)
    torch.manual_seed(3)  # as the makers do
    expected = agent._make_model().state_dict()
    assert not differences(dict(agent.model.state_dict()), dict(expected))
    assert not hasattr(agent, "target") or not differences(dict(agent.target.state_dict()), dict(expected))


@pytest.mark.parametrize("name", MAKERS)
def test_the_order_of_keys_in_a_state_does_not_matter(name):
    first, second = MAKERS[name](name), MAKERS[name](name)
    for network in (first.model, getattr(first, "target", first.model)):
        for parameter in network.parameters():
            parameter.data.add_(torch.randn_like(parameter))
    state = deepcopy(first.state_dict())
    assert differences(state, second.state_dict())
    second.load_state_dict(dict(reversed(state.items())))
    assert not differences(state, second.state_dict())


def test_a_part_that_a_checkpoint_lacks_is_named():
    agent = MAKERS["dqn"]("dqn")
    state = agent.state_dict()
    del state["optimizer"]
    with pytest.raises(ValueError, match=r"it lacks optimizer, which DQN\.checkpoint_parts"):
        agent.load_state_dict(state)
