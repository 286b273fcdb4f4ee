"""IMPALA, CLEAR and LASER equal the papers' sums written step by step, and numbers by hand."""

from copy import deepcopy
from math import log

import numpy as np
import pytest
import torch

from core.agents.impala import Impala
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

CLEAR = {"policy_cloning_cost": 0.3, "value_cloning_cost": 0.2}
SETTINGS = {
    "impala": {},
    "three clips": {
        "rho_bar": 1.4,
        "c_bar": 0.7,
        "pg_rho_bar": 2.0,
        "trace_lambda": 0.9,
        "entropy_cost": 0.1,
        "baseline_cost": 0.8,
    },
    "clear": {**CLEAR, "gamma": 0.97},
    "policies cloned": {"policy_cloning_cost": 0.3},
    "values cloned": {"value_cloning_cost": 0.2},
    "laser, implied": {"relevance": "implied", "relevance_threshold": 0.12, "rho_bar": 1.3},
    "laser, kl": {"relevance": "kl", "relevance_threshold": 0.6},
    "clear and laser": {**CLEAR, "relevance": "implied", "relevance_threshold": 0.2, "pg_rho_bar": 1.5},
}


def is_relevant(params, pi, mu):
    if params.relevance == "none":
        return True
    implied = np.minimum(params.rho_bar * mu, pi)
    return divergence(pi, implied / implied.sum() if params.relevance == "implied" else mu) < params.relevance_threshold


def twin(params, batch, logits, values):
    """Return the loss of 1802.01561 (4.2), 1811.11682 (3) and 1909.11583 (4), and the included steps [T, B]."""
    (actions, rewards, discounts, behaviour_logits, behaviour_values), lasts = columns(batch)
    length, streams = actions.shape
    total, included = Sum(length + 1, streams), np.zeros((length, streams), bool)
    for b in range(streams):
        fresh = batch.fresh is None or bool(batch.fresh[b])
        pi, mu = ([softmax(table[t, b]) for t in range(length)] for table in (logits, behaviour_logits))
        ratios = [pi[t][actions[t, b]] / mu[t][actions[t, b]] for t in range(length)]
        included[:, b] = [not lasts[t, b] and (fresh or is_relevant(params, pi[t], mu[t])) for t in range(length)]
        targets = vtrace_targets(
            ratios,
            rewards[:, b],
            params.gamma * discounts[:, b],
            values[:, b],
            included[:, b],
            params.rho_bar,
            params.c_bar,
            params.trace_lambda,
        )
        for t in range(length):
            row, action, value = (t, b), actions[t, b], values[t, b]
            if not lasts[row] and (fresh or params.relevance == "none"):
                total.add_entropy(row, params.entropy_cost, pi[t])
            if not included[row]:
                continue
            advantage = min(params.pg_rho_bar, ratios[t]) * (
                rewards[row] + params.gamma * discounts[row] * targets[t + 1] - value
            )
            total.add(row, -advantage * log(pi[t][action]), to_logits=-advantage * (np.eye(A)[action] - pi[t]))
            total.add_baseline(row, params.baseline_cost, value, targets[t])
            if not fresh:
                cost, error = params.value_cloning_cost, value - behaviour_values[row]
                total.add(
                    row,
                    params.policy_cloning_cost * divergence(mu[t], pi[t]),
                    params.policy_cloning_cost * (pi[t] - mu[t]),
                )
                total.add(row, cost * error**2, to_value=2 * cost * error)
    return total, included


def one_row(pi, mu, action=0, reward=1.0, fresh=False, value=0.5, behaviour_value=2.0, **settings):
    """Return an agent and a batch of one step with these policies; V of the bootstrap step is 0.25."""
    logits, behaviour = (np.log([[[*p, *[1e-9] * (A - len(p))]]]) for p in (pi, mu))
    agent = table_agent(Impala, np.concatenate([logits, logits]), np.array([[value], [0.25]]), **settings)
    batch = make_batch(
        np.full((1, 1), reward),
        np.ones((1, 1)),
        np.zeros((2, 1), bool),
        np.full((1, 1), action),
        behaviour,
        np.full((1, 1), behaviour_value),
        np.array([fresh]),
    )
    return agent, batch


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("fresh", ["mixed", "none", "unknown"])
def test_loss_and_gradient_equal_the_papers(settings, fresh):
    batch, logits, values = random_unrolls(seed=1)
    batch = batch._replace(fresh={"mixed": batch.fresh, "none": batch.fresh & False, "unknown": None}[fresh])
    agent = table_agent(Impala, logits, values, **settings)
    expected, included = twin(agent.params, batch, logits, values)
    output = agent.learn(batch)
    expected.assert_is_that_of(agent, output)
    taken = ~batch.window.lasts[:-1]
    assert float(output.statistics["trusted_fraction"]) == pytest.approx(included.sum() / int(taken.sum()))
    assert output.priorities is None and not output.skipped


def test_random_unrolls_lie_on_both_sides_of_every_threshold():
    batch, logits, values = random_unrolls(seed=1)
    (actions, _, discounts, behaviour_logits, _), lasts = columns(batch)
    taken, ending = ~lasts[:-1], lasts[1:]
    place = np.argwhere(taken)
    ratios = np.array(
        [softmax(logits[t, b])[actions[t, b]] / softmax(behaviour_logits[t, b])[actions[t, b]] for t, b in place]
    )
    for clip in (0.7, 1.0, 1.3, 1.4, 1.5, 2.0):
        assert 0.1 < (ratios < clip).mean() < 0.9
    for row in (
        taken & ending & (discounts == 0),
        taken & ending & (discounts == 1),
        taken & ~ending & (discounts == 0),
        lasts[:-1],
    ):
        assert row.sum() > 10
    assert lasts[-1].any() and 0.2 < batch.fresh.double().mean() < 0.8
    for settings in (SETTINGS["laser, implied"], SETTINGS["laser, kl"], SETTINGS["clear and laser"]):
        agent = table_agent(Impala, logits, values, **settings)
        included = twin(agent.params, batch, logits, values)[1]
        assert 0.1 < included[taken & ~batch.fresh.numpy()].mean() < 0.9


def test_on_policy_it_is_the_n_step_target_and_policy_gradient():
    logits, values = np.log(np.tile([0.1, 0.2, 0.3, 0.4], (4, 1, 1))), np.array([[-7.0], [4], [9], [8]])
    batch = make_batch(
        np.array([[1.0], [2], [3]]),
        np.ones((3, 1)),
        np.zeros((4, 1), bool),
        np.array([[0], [3], [1]]),
        logits[:3] + 5.0,
        np.zeros((3, 1)),
    )
    agent = table_agent(Impala, logits, values, gamma=0.5, entropy_cost=0.0, baseline_cost=1.0)
    output = agent.learn(batch)
    targets = [1 + 2 / 2 + 3 / 4 + 8 / 8, 2 + 3 / 2 + 8 / 4, 3 + 8 / 2]
    advantages = [3.75 + 7, 5.5 - 4, 7 - 9]  # target minus value
    assert targets == [3.75, 5.5, 7]
    policy = -(10.75 * log(0.1) + 1.5 * log(0.4) - 2 * log(0.2))
    assert float(output.statistics["policy_loss"]) == pytest.approx(policy)
    assert float(output.statistics["loss"]) == pytest.approx(policy + 0.5 * (10.75**2 + 1.5**2 + 2**2))
    assert agent.model.values.grad.tolist() == pytest.approx([-10.75, -1.5, 2, 0])
    one_hot, pi = np.eye(A)[[0, 3, 1]], np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(
        agent.model.logits.grad.numpy()[:3], -np.array(advantages)[:, None] * (one_hot - pi), atol=1e-12
    )
    assert not agent.model.logits.grad[3].any()


def test_policy_cloning_uses_mu_and_value_cloning_stored_values():
    pi, mu = (0.5, 0.5), (0.9, 0.1)
    plain, cloned = (one_row(pi, mu, **settings) for settings in ({}, CLEAR))
    difference = cloned[0].learn(cloned[1]).statistics["loss"] - plain[0].learn(plain[1]).statistics["loss"]
    towards = 0.9 * log(0.9 / 0.5) + 0.1 * log(0.1 / 0.5)  # KL(mu || pi) = .368; KL(pi || mu) would be .511
    assert float(difference) == pytest.approx(0.3 * towards + 0.2 * (0.5 - 2.0) ** 2, abs=1e-6)
    gradient = cloned[0].model.logits.grad[0] - plain[0].model.logits.grad[0]
    assert gradient[:2].tolist() == pytest.approx([0.3 * (0.5 - 0.9), 0.3 * (0.5 - 0.1)], abs=1e-6)
    assert float(cloned[0].model.values.grad[0] - plain[0].model.values.grad[0]) == pytest.approx(2 * 0.2 * (0.5 - 2.0))


@pytest.mark.parametrize(
    "relevance, far",
    [("implied", 0.8 * log(0.8 / (0.5 / 0.7)) + 0.2 * log(0.7)), ("kl", 0.8 * log(1.6) + 0.2 * log(0.4))],
)
def test_an_irrelevant_replayed_step_leaves_every_loss(relevance, far):
    # pi = (.8, .2), mu = (.5, .5): min(mu, pi) = (.5, .2), which sums to .7.
    for threshold, fresh, learnt in ((far + 1e-6, False, True), (far - 1e-6, False, False), (far - 1e-6, True, True)):
        agent, batch = one_row(
            (0.8, 0.2), (0.5, 0.5), fresh=fresh, relevance=relevance, relevance_threshold=threshold, **CLEAR
        )
        output = agent.learn(batch)
        assert agent.model.logits.grad.any() == agent.model.values.grad.any() == learnt
        assert (
            float(output.statistics["trusted_fraction"]) == learnt
            and float(output.statistics["on_policy_fraction"]) == fresh
        )
        assert float(output.statistics["behaviour_kl"]) == pytest.approx(0.8 * log(1.6) + 0.2 * log(0.4), abs=1e-6)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
@pytest.mark.parametrize("broken", ["reward", "behaviour"])
def test_a_non_finite_loss_changes_nothing(optimizer, broken):
    batch, logits, values = random_unrolls(seed=4)
    agent = table_agent(Impala, logits, values, optimizer=optimizer, **CLEAR)
    agent.learn(batch)
    before = deepcopy(agent.state_dict())
    window = deepcopy(batch.window)
    row = tuple(np.argwhere(~window.lasts[:-1].numpy())[0])
    (window.rewards if broken == "reward" else window.extras["logits"])[row] = float("nan")
    assert agent.learn(batch._replace(window=window)).skipped
    after = agent.state_dict()
    assert not differences(before["model"], after["model"])
    assert not differences(before["optimizer"]["optimizer"]["state"], after["optimizer"]["optimizer"]["state"])
    assert not agent.learn(batch).skipped


def test_unrolls_without_actions_have_zero_loss_and_statistics():
    batch = make_batch(
        np.zeros((1, 2)),
        np.ones((1, 2)),
        np.array([[True, True], [False, False]]),
        np.zeros((1, 2), np.int64),
        np.zeros((1, 2, A)),
        np.zeros((1, 2)),
    )
    output = table_agent(Impala, np.zeros((2, 2, A)), np.ones((2, 2))).learn(batch)
    assert not output.skipped and float(output.statistics["loss"]) == 0
    assert all(torch.isfinite(value) for value in output.statistics.values())


def test_statistics_are_means_over_the_steps_with_an_action():
    batch, logits, values = random_unrolls(seed=5)
    output = table_agent(Impala, logits, values).learn(batch)
    (_, _, _, behaviour_logits, _), lasts = columns(batch)
    rows = [
        (softmax(logits[t, b]), softmax(behaviour_logits[t, b]), bool(batch.fresh[b]))
        for t, b in np.argwhere(~lasts[:-1])
    ]
    expected = {
        "entropy": np.mean([-(pi * np.log(pi)).sum() for pi, _, _ in rows]),
        "on_policy_fraction": np.mean([fresh for *_, fresh in rows]),
        "behaviour_kl": np.mean([divergence(pi, mu) for pi, mu, _ in rows]),
        "trusted_fraction": 1.0,
        "value_mean": values.mean(),
    }
    assert {name: float(output.statistics[name]) for name in expected} == pytest.approx(expected)
    assert not any(value.requires_grad for value in output.statistics.values())


def test_the_gradient_is_clipped_as_a_whole():
    batch, logits, values = random_unrolls(seed=6)
    agent = table_agent(Impala, logits, values, clip_norm=0.5)
    norm = float(agent.learn(batch).statistics["grad_norm"])
    clipped = torch.cat([agent.model.logits.grad.flatten(), agent.model.values.grad]).norm()
    assert norm > 1 and float(clipped) == pytest.approx(0.5, rel=1e-4)
