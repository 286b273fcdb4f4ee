"""IMPACT equals the paper's sums written step by step; its target network and KL coefficient adapt as specified."""

from copy import deepcopy
from math import log

import numpy as np
import pytest
import torch

from core.agents.impact import KL_SPAN, Impact
from tests.core.agents.unrolls import (
    A,
    Sum,
    columns,
    differences,
    divergence,
    make_batch,
    random_unrolls,
    softmax,
    table_agent,
    vtrace_targets,
)

SETTINGS = {
    "impact": {"clip_epsilon": 0.2},
    "other clips": {
        "clip_epsilon": 0.4,
        "beta_max": 1.3,
        "rho_bar": 1.4,
        "c_bar": 0.7,
        "trace_lambda": 0.9,
        "entropy_cost": 0.1,
        "baseline_cost": 0.8,
    },
    "with a divergence": {"kl_coefficient": 0.75},
}


def with_target(agent, logits):
    """Set the target network's logits [T + 1, B, A] apart from the online ones, and its values far away."""
    agent.target.logits.data[:] = torch.tensor(logits).flatten(0, 1)
    agent.target.values.data[:] = 1e6
    return agent


def random_target(logits, seed=9):
    return logits + 0.7 * np.random.default_rng(seed).normal(size=logits.shape)


def twin(params, batch, logits, values, target_logits):
    """Return equation 4 of 1912.00167 with V-trace advantages, and (r, advantage, beta) of each taken step.

    beta is mu / pi_target before it is clipped.
    """
    (actions, rewards, discounts, behaviour_logits, _), lasts = columns(batch)
    length, streams = actions.shape
    total, rows = Sum(length + 1, streams), []
    for b in range(streams):
        pi, target, mu = (
            [softmax(table[t, b]) for t in range(length)] for table in (logits, target_logits, behaviour_logits)
        )
        taken = [not lasts[t, b] for t in range(length)]
        ratios = [target[t][actions[t, b]] / mu[t][actions[t, b]] for t in range(length)]
        targets = vtrace_targets(
            ratios,
            rewards[:, b],
            params.gamma * discounts[:, b],
            values[:, b],
            taken,
            params.rho_bar,
            params.c_bar,
            params.trace_lambda,
        )
        for t in range(length):
            if not taken[t]:
                continue
            row, action = (t, b), actions[t, b]
            advantage = rewards[row] + params.gamma * discounts[row] * targets[t + 1] - values[row]
            beta = min(mu[t][action] / target[t][action], params.beta_max)
            r = beta * pi[t][action] / mu[t][action]
            clipped = min(max(r, 1 - params.clip_epsilon), 1 + params.clip_epsilon)
            slope = r * advantage if r * advantage <= clipped * advantage else 0.0  # d r / d log pi = r
            total.add(row, -min(r * advantage, clipped * advantage), to_logits=-slope * (np.eye(A)[action] - pi[t]))
            total.add_baseline(row, params.baseline_cost, values[row], targets[t])
            total.add_entropy(row, params.entropy_cost, pi[t])
            total.add(
                row, params.kl_coefficient * divergence(target[t], pi[t]), params.kl_coefficient * (pi[t] - target[t])
            )
            rows.append((r, advantage, mu[t][action] / target[t][action]))
    return total, np.array(rows)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_loss_and_gradient_equal_the_papers(settings):
    batch, logits, values = random_unrolls(seed=1)
    target_logits = random_target(logits)
    agent = with_target(table_agent(Impact, logits, values, **settings), target_logits)
    expected, rows = twin(agent.params, batch, logits, values, target_logits)
    output = agent.learn(batch)
    expected.assert_is_that_of(agent, output)
    assert output.priorities is None and not output.skipped
    r, advantage, beta = rows.T
    epsilon = agent.params.clip_epsilon
    for region in (r < 1 - epsilon, (r > 1 - epsilon) & (r < 1 + epsilon), r > 1 + epsilon):
        assert (region & (advantage > 0)).mean() > 0.05 and (region & (advantage < 0)).mean() > 0.05
    assert 0.05 < (beta > agent.params.beta_max).mean() < 0.95
    assert agent.target.logits.grad is None and not any(
        parameter.requires_grad for parameter in agent.target.parameters()
    )


def test_on_policy_it_is_the_plain_policy_gradient():
    logits, values = np.log(np.tile([0.1, 0.2, 0.3, 0.4], (4, 1, 1))), np.array([[-7.0], [4], [9], [8]])
    batch = make_batch(
        np.array([[1.0], [2], [3]]),
        np.ones((3, 1)),
        np.zeros((4, 1), bool),
        np.array([[0], [3], [1]]),
        logits[:3] + 5.0,
        np.zeros((3, 1)),
    )
    agent = table_agent(Impact, logits, values, gamma=0.5, entropy_cost=0.0, baseline_cost=1.0)
    output = agent.learn(batch)
    # 1 + 2 / 2 + 3 / 4 + 8 / 8, 2 + 3 / 2 + 8 / 4 and 3 + 8 / 2, minus the values
    advantages = [3.75 + 7, 5.5 - 4, 7 - 9]
    assert float(output.statistics["policy_loss"]) == pytest.approx(-sum(advantages))
    one_hot, pi = np.eye(A)[[0, 3, 1]], np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(
        agent.model.logits.grad.numpy()[:3], -np.array(advantages)[:, None] * (one_hot - pi), atol=1e-9
    )
    assert agent.model.values.grad.tolist() == pytest.approx([-10.75, -1.5, 2, 0])


def test_the_target_network_is_copied_every_update_period():
    batch, logits, values = random_unrolls(seed=4, streams=6)
    agent = table_agent(Impact, logits, values, target_update_period=3)
    weights = [torch.tensor(logits).flatten(0, 1)]  # the weights after each update
    for update in range(1, 8):
        agent.learn(batch)
        weights.append(agent.model.logits.detach().clone())
        assert torch.equal(agent.target.logits, weights[update - update % 3])
        assert not torch.equal(weights[update], weights[update - 1])


@pytest.mark.parametrize("kl_target, factor", [(1e-9, 2.0), (1e6, 0.5)])
def test_the_kl_coefficient_adapts_when_the_target_is_copied(kl_target, factor):
    batch, logits, values = random_unrolls(seed=5, streams=6)
    agent = table_agent(Impact, logits, values, target_update_period=2, kl_coefficient=0.4, kl_target=kl_target)
    used = [float(agent.learn(batch).statistics["kl_coefficient"]) for _ in range(6)]
    assert used == pytest.approx([0.4, 0.4, 0.4 * factor, 0.4 * factor, 0.4 * factor**2, 0.4 * factor**2])


def test_the_kl_coefficient_follows_the_kl_just_before_a_copy():
    batch, logits, values = random_unrolls(seed=5, streams=6)
    agent = table_agent(Impact, logits, values, target_update_period=2, kl_coefficient=0.4, learning_rate=0.02)
    measured = [float(agent.learn(batch).statistics["target_kl"]) for _ in range(4)]
    assert measured[0] == measured[2] == 0 and measured[1] > 1e-4 and measured[3] > 1e-4
    steady = table_agent(
        Impact, logits, values, target_update_period=2, kl_coefficient=0.4, learning_rate=0.02, kl_target=measured[1]
    )
    assert [float(steady.learn(batch).statistics["kl_coefficient"]) for _ in range(4)] == pytest.approx([0.4] * 4)


@pytest.mark.parametrize("kl_target, bound", [(1e-12, KL_SPAN), (1e6, 1 / KL_SPAN)])
def test_the_kl_coefficient_is_bounded(kl_target, bound):
    batch, logits, values = random_unrolls(seed=6, streams=2)
    agent = table_agent(Impact, logits, values, target_update_period=2, kl_coefficient=0.4, kl_target=kl_target)
    for _ in range(30):
        output = agent.learn(batch)
    assert float(output.statistics["kl_coefficient"]) == pytest.approx(0.4 * bound)


def test_without_a_kl_term_the_coefficient_stays_zero():
    batch, logits, values = random_unrolls(seed=5, streams=6)
    agent = table_agent(Impact, logits, values, target_update_period=1, kl_target=1e-9)
    assert [float(agent.learn(batch).statistics["kl_coefficient"]) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("before, now, expected", [(0.0, 0.4, 0.4), (0.4, 0.0, 0.0), (0.4, 0.5, 0.8)])
def test_a_resumed_run_keeps_an_adapted_kl_coefficient(before, now, expected):
    batch, logits, values = random_unrolls(seed=5, streams=6)
    first, second = (
        table_agent(Impact, logits, values, target_update_period=1, kl_target=1e-9, kl_coefficient=each)
        for each in (before, now)
    )
    with_target(first, random_target(logits)).learn(batch)  # doubles it
    second.load_state_dict(deepcopy(first.state_dict()))
    assert second.state_dict()["kl_coefficient"] == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_a_non_finite_loss_changes_nothing(optimizer):
    batch, logits, values = random_unrolls(seed=7)
    agent = table_agent(
        Impact, logits, values, optimizer=optimizer, kl_coefficient=0.4, kl_target=1e-9, target_update_period=2
    )
    agent.learn(batch)
    before = deepcopy(agent.state_dict())
    window = deepcopy(batch.window)
    window.rewards[tuple(np.argwhere(~window.lasts[:-1].numpy())[0])] = float("nan")
    assert agent.learn(batch._replace(window=window)).skipped
    after = agent.state_dict()
    assert not differences(before["model"], after["model"]) and before["kl_coefficient"] == after["kl_coefficient"]
    assert not differences(before["target"], after["target"])  # an update of the target was due
    assert not differences(before["optimizer"]["optimizer"]["state"], after["optimizer"]["optimizer"]["state"])
    assert not agent.learn(batch).skipped


def test_statistics_are_means_over_the_steps_with_an_action():
    batch, logits, values = random_unrolls(seed=8)
    target_logits = random_target(logits)
    agent = with_target(table_agent(Impact, logits, values), target_logits)
    output = agent.learn(batch)
    (actions, *_), lasts = columns(batch)
    rows = [(softmax(logits[t, b]), softmax(target_logits[t, b]), actions[t, b]) for t, b in np.argwhere(~lasts[:-1])]
    expected = {
        "entropy": np.mean([-sum(p * log(p) for p in pi) for pi, *_ in rows]),
        "value_mean": values.mean(),
        "target_kl": np.mean([divergence(target, pi) for pi, target, _ in rows]),
        "target_abs_log_ratio": np.mean([abs(log(pi[a] / target[a])) for pi, target, a in rows]),
    }
    assert {name: float(output.statistics[name]) for name in expected} == pytest.approx(expected)
    assert not any(value.requires_grad for value in output.statistics.values())
