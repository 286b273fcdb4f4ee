"""Actor-critics of several choices learn what they would learn of all combinations as actions of their own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.agents.impact import Impact
from core.agents.impala import Impala
from core.agents.ppo import PPO
from core.specs import MultiDiscrete
from tests.core.agents.unrolls import SPEC, Table, random_unrolls, table_agent

NVEC = (2, 2)  # together as many as the actions of random_unrolls
COMBINATIONS = np.array(list(np.ndindex(*NVEC)))
SETTINGS = {
    Impala: {"rho_bar": 1.5, "pg_rho_bar": 2.0, "policy_cloning_cost": 0.3, "relevance": "kl"},
    Impact: {"kl_coefficient": 0.2},
    PPO: {"epochs": 1, "minibatches": 1, "rho_bar": 1.4},
}


def joint(logits):
    """Return the logits [..., 4] of all combinations by those of two choices, [..., 2 + 2]."""
    return np.stack([logits[..., i] + logits[..., 2 + j] for i, j in COMBINATIONS], -1)


@pytest.mark.parametrize("agent_class", SETTINGS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_an_update_equals_that_of_all_combinations(agent_class, on_policy):
    batch, logits, values = random_unrolls(1)
    batch = batch._replace(on_policy=on_policy)
    window, behaviour = batch.window, batch.window.extras["logits"].numpy()
    of_combinations = batch._replace(
        window=window._replace(extras={**window.extras, "logits": torch.from_numpy(joint(behaviour))})
    )
    taken = torch.from_numpy(COMBINATIONS[window.actions.numpy().clip(0)])
    settings = {
        "batch_size": 80,
        "entropy_cost": 0.05,
        "optimizer": "adam",
        "learning_rate": 0.02,
        **SETTINGS[agent_class],
    }
    single = table_agent(agent_class, joint(logits), values, **settings)
    several = agent_class(
        replace(single.params), replace(SPEC, action=MultiDiscrete(NVEC)), lambda: Table(logits, values)
    )
    several.init_learner()
    for agent, given in ((single, of_combinations), (several, batch._replace(window=window._replace(actions=taken)))):
        statistics = agent.learn(given).statistics
        found = {name: float(value) for name, value in statistics.items()}
        if agent is single:
            expected, values_after = found, single.model.values.detach()
    assert found.keys() == expected.keys()
    for name in found.keys() - {"grad_norm", "lr"}:  # tables of other sizes have other norms
        assert found[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    torch.testing.assert_close(several.model.values.detach(), values_after)
    gradient = single.model.logits.grad.numpy()  # the chain rule: a choice's logit is part of several combinations'
    places = COMBINATIONS + np.array([0, 2])
    by_choice = np.zeros_like(gradient)
    for number, (i, j) in enumerate(places):
        by_choice[:, i] += gradient[:, number]
        by_choice[:, j] += gradient[:, number]
    np.testing.assert_allclose(several.model.logits.grad.numpy(), by_choice, atol=1e-12)
