"""A skipped update leaves the statistics of normalisations, which change before it is known to be skipped."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from core.learning.updates import EagerUpdates, GraphedUpdate, StagedBatches
from tests.core.agents.control_agents import make_agent, make_batch, timestep
from tests.core.agents.unrolls import differences


def make_updates(kind):
    agent = make_agent("sac", learner=False, network={"normalize_observations": True})
    agent.model.policy = nn.Sequential(nn.BatchNorm1d(5), agent.model.policy)
    for critic in agent.model.critic:
        critic.layers = nn.Sequential(nn.BatchNorm1d(8), critic.layers)
    agent.init_learner()
    if kind == "eager":
        return agent, EagerUpdates(agent, False)
    return agent, GraphedUpdate(agent, StagedBatches(torch.device("cpu")), capture=False)


def faulty(agent, field):
    batch = make_batch(agent, seed=1)
    getattr(batch.window, field)[0, 2] = float("nan")
    return batch


@pytest.mark.parametrize("kind", ["eager", "planned"])
@pytest.mark.parametrize("field", ["rewards", "observations"])
def test_a_non_finite_update_changes_no_statistics(kind, field):
    agent, updates = make_updates(kind)
    updates(make_batch(agent))
    before = deepcopy(agent.state_dict())
    updates(faulty(agent, field))
    networks = ("model", "target")
    assert not differences(*({name: state[name] for name in networks} for state in (agent.state_dict(), before)))
    assert torch.isfinite(torch.from_numpy(agent.act(timestep(torch.ones(1, 5).numpy()), (), None).action)).all()
    updates(make_batch(agent, seed=2))
    assert updates.statistics()["nonfinite_updates"] == 1
    for network in networks:
        assert differences(agent.state_dict()[network], before[network])
