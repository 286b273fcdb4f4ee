"""Agents with masks learn what agents without masks learn if illegal actions are worthless, whatever their values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from core.agents.dqn import DQN
from core.agents.impact import Impact
from core.agents.impala import Impala
from core.agents.iqn import IQN
from core.agents.ppo import PPO
from core.agents.r2d2 import R2D2
from core.agents.rainbow import Rainbow
from core.model import Model
from core.specs import ArraySpec, Discrete, EnvSpec, Mixed
from core.types import ACTION_MASK, Batch, OARInputs, QuantileInputs, SampleIds, TimeStep, Window
from tests.core.agents.unrolls import SPEC, Table, random_unrolls, table_agent

A, N, COLUMNS, N_STEP, GAMMA = 4, 5, 40, 2, 0.9
PLAIN = EnvSpec("table", ArraySpec((1,), "float32"), 0, Discrete(A))
MASKED = replace(PLAIN, has_action_mask=True)
MUNCHAUSEN = {"munchausen_alpha": 0.9, "munchausen_temperature": 0.3, "double_q": False}
C51 = {"distribution": "categorical", "v_min": -3.0, "v_max": 3.0}
AGENTS = {  # agent, shape of a model's numbers for an action, settings
    "dqn": (DQN, (), {"double_q": False}),
    "double dqn": (DQN, (), {"double_q": True}),
    "munchausen dqn": (DQN, (), MUNCHAUSEN),
    "c51": (Rainbow, (N,), {**C51, "double_q": False}),
    "double c51": (Rainbow, (N,), {**C51, "double_q": True}),
    "quantiles": (Rainbow, (N,), {"distribution": "quantile"}),
    "munchausen quantiles": (Rainbow, (N,), {"distribution": "quantile", **MUNCHAUSEN}),
    "iqn": (IQN, (2,), {}),
    "double iqn": (IQN, (2,), {"double_q": True}),
    "munchausen iqn": (IQN, (2,), MUNCHAUSEN),
    "r2d2": (R2D2, (), {"double_q": False}),
    "double r2d2": (R2D2, (), {"double_q": True}),
}


class TableOfActions(Model):
    """Look the numbers [A, ...] of a state up."""

    observations = "vector"

    def __init__(self, table):
        super().__init__(None, PLAIN)
        self.table = nn.Parameter(torch.from_numpy(table.copy()))

    def forward(self, inputs, state):
        if isinstance(inputs, QuantileInputs):
            lines = self.table[inputs.observation[:, 0].long()]  # [B, A, 2]
            return lines[..., :1] + lines[..., 1:] * inputs.fractions[:, None], state
        observation = inputs.observation if isinstance(inputs, OARInputs) else inputs
        return self.table[observation[..., 0].long()], state

    def unroll(self, inputs, firsts, state):
        return self.forward(inputs, state)


def make_agent(name, spec, online, target):
    agent_class, _, settings = AGENTS[name]
    if agent_class is R2D2:
        settings = {**settings, "burn_in": 2, "unroll_length": 4, "sequence_period": 3}
    params = agent_class.Params(n_step=N_STEP, gamma=GAMMA, clip_norm=0.0, learning_rate=0.1, **settings)
    agent = agent_class(params, spec, lambda: TableOfActions(online))
    agent.init_learner()
    agent.target.table.data = torch.from_numpy(target.copy())
    return agent


def make_windows(agent, seed):
    """Return windows with ends of episodes, each step a state of its own, and legal actions [rows, B, A]."""
    draw, rows = np.random.default_rng(seed), agent.window.length + 1
    lasts = np.zeros((rows, COLUMNS), bool)
    for row in range(1, rows):
        lasts[row] = ~lasts[row - 1] & (draw.random(COLUMNS) < 0.2)
    discounts = np.where(draw.random((rows, COLUMNS)) < 0.2, 0.0, 1.0)
    legal = draw.random((rows, COLUMNS, A)) < 0.5
    legal[..., 1] |= ~legal.any(2)
    actions = np.where(legal, draw.random(legal.shape), -1).argmax(2)
    states = np.arange(rows * COLUMNS).reshape(rows, COLUMNS)
    shown = states
    if not agent.window.stride:
        ends = np.where(lasts, np.arange(rows)[:, None], rows - 1).min(0)
        shown = np.stack([states[0], states[ends, np.arange(COLUMNS)]])
    extras = {"previous_action": actions, "previous_reward": np.zeros((rows, COLUMNS)), ACTION_MASK: legal}
    window = Window(
        torch.from_numpy(shown[..., None].astype(np.float32)),
        torch.zeros(rows, COLUMNS, dtype=torch.bool),
        torch.from_numpy(lasts),
        torch.from_numpy(actions),
        torch.from_numpy(draw.normal(size=(rows, COLUMNS))),
        torch.from_numpy(discounts),
        {name: torch.from_numpy(array) for name, array in extras.items()},
        (torch.zeros(COLUMNS),) if isinstance(agent, R2D2) else (),
    )
    return Batch(window, SampleIds(np.zeros(COLUMNS, np.int64), np.arange(COLUMNS)), torch.ones(COLUMNS)), legal


def with_illegal(name, table, legal, good):
    """Return the table with numbers that make illegal actions better, or worse, than any other."""
    agent_class, _, settings = AGENTS[name]
    numbers = np.full(table.shape[2:], 60.0 if good else -2_000.0)
    if settings.get("distribution") == "categorical":
        numbers = np.full(N, -50.0)
        numbers[-1 if good else 0] = 50.0
    elif agent_class is IQN:
        numbers[1] = 0.0
    result = table.copy()
    result[~legal.reshape(-1, A)] = numbers
    return result


@pytest.mark.parametrize("name", AGENTS)
def test_an_update_equals_one_whose_illegal_actions_are_worthless(name):
    _, shape, _ = AGENTS[name]
    draw = np.random.default_rng(1)
    empty = np.zeros((1, A, *shape))
    batch, legal = make_windows(make_agent(name, PLAIN, empty, empty), 2)
    size = legal.shape[0] * COLUMNS
    online, target = (draw.normal(0, 0.5, (size, A, *shape)) for _ in range(2))
    results = []
    for spec, good in ((MASKED, True), (PLAIN, False)):
        tables = (with_illegal(name, table, legal, good) for table in (online, target))
        agent = make_agent(name, spec, *tables)
        torch.manual_seed(3)  # IQN's fractions
        output = agent.learn(batch)
        results.append((float(output.statistics["loss"]), output.priorities, agent.model.table.detach()))
    (loss, priorities, learnt), (expected_loss, expected_priorities, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(priorities, expected_priorities, rtol=1e-5, atol=1e-6)
    allowed = torch.from_numpy(legal.reshape(-1, A))
    torch.testing.assert_close(learnt[allowed], expected[allowed], rtol=1e-5, atol=1e-6)
    before = torch.from_numpy(with_illegal(name, online, legal, True))
    assert torch.equal(learnt[~allowed], before[~allowed]) and (learnt[allowed] != before[allowed]).any()


@pytest.mark.parametrize("double_q", [False, True])
def test_dqns_targets_equal_a_loop_over_legal_actions(double_q):
    draw, name = np.random.default_rng(4), "double dqn" if double_q else "dqn"
    empty = np.zeros((1, A))
    batch, legal = make_windows(make_agent(name, PLAIN, empty, empty), 5)
    online, target = (draw.normal(size=(legal.shape[0] * COLUMNS, A)) for _ in range(2))
    window, expected = batch.window, []
    for b in range(COLUMNS):
        total, product, step = 0.0, 1.0, 0
        while step < N_STEP and not window.lasts[step, b]:
            total += product * float(window.rewards[step, b])
            product *= GAMMA * float(window.discounts[step, b])
            step += 1
        state = step * COLUMNS + b
        allowed = [a for a in range(A) if legal[step, b, a]]
        chooser = online if double_q else target
        best = max(allowed, key=lambda a: chooser[state, a])
        expected.append(abs(total + product * target[state, best] - online[b, int(window.actions[0, b])]))
    found = make_agent(name, MASKED, online, target).learn(batch).priorities
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["dqn", "c51", "iqn", "r2d2"])
def test_value_agents_choose_and_explore_legal_actions_only(name):
    _, shape, _ = AGENTS[name]
    draw = np.random.default_rng(6)
    legal = draw.random((30, A)) < 0.4
    legal[:, 3] |= ~legal.any(1)
    table = with_illegal(name, draw.normal(size=(30, A, *shape)), legal, True)
    agent = make_agent(name, MASKED, table, table)
    if name == "iqn":  # which chooses its fractions itself
        agent.values = lambda timestep, state: (torch.from_numpy(table[..., 0]), state)
    zeros, flags = np.zeros(30, np.float32), np.zeros(30, bool)
    observation = np.arange(30, dtype=np.float32)[:, None]
    timestep = TimeStep(observation, zeros, zeros + 1, flags, flags, zeros, legal)
    for epsilon in (0.0, 0.5, 1.0):
        exploration = agent.exploration(0, 1, 30, np.random.default_rng(7))
        exploration.epsilon = np.full(30, epsilon)
        for _ in range(20):
            output = agent.act(timestep, agent.initial_state(30), exploration)
            assert legal[np.arange(30), output.action].all()
    greedy = agent.act(timestep, agent.initial_state(30), None)
    np.testing.assert_array_equal(greedy.extras["q_max"], greedy.extras["q_taken"])
    assert (greedy.extras["q_max"] < 50).all()


SETTINGS = {
    Impala: {"policy_cloning_cost": 0.3, "relevance": "implied", "relevance_threshold": 0.2},
    Impact: {"kl_coefficient": 0.2},
    PPO: {"epochs": 2, "minibatches": 3, "rho_bar": 1.4},
}


@pytest.mark.parametrize("agent_class", SETTINGS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_an_actor_critics_update_equals_one_whose_illegal_actions_are_impossible(agent_class, on_policy):
    batch, logits, values = random_unrolls(1)
    batch, window = batch._replace(on_policy=on_policy), batch.window
    draw = np.random.default_rng(2)
    legal = draw.random(logits.shape) < 0.5
    legal[:-1] |= np.arange(A) == window.actions[:-1].numpy()[..., None]
    behaviour = window.extras["logits"].clone()
    lowest = torch.finfo(behaviour.dtype).min  # as `act` stores them
    results = []
    for masked in (True, False):
        table = logits.copy() if masked else np.where(legal, logits, -1e4)
        stored = torch.where(torch.from_numpy(legal), behaviour, lowest if masked else -1e4)
        stored[-1] = torch.nan
        extras = {**window.extras, "logits": stored, **({ACTION_MASK: torch.from_numpy(legal)} if masked else {})}
        settings = {"batch_size": 80, "entropy_cost": 0.05, "optimizer": "adam", "learning_rate": 0.02}
        agent = table_agent(agent_class, table, values, **settings, **SETTINGS[agent_class])
        agent.spec = replace(agent.spec, has_action_mask=masked)
        torch.manual_seed(3)  # PPO's minibatches
        statistics = agent.learn(batch._replace(window=window._replace(extras=extras))).statistics
        results.append(({name: float(value) for name, value in statistics.items()}, agent.model, table))
    (found, model, before), (expected, reference, _) = results
    assert found.keys() == expected.keys() and all(np.isfinite(list(found.values())))
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-7, abs=1e-9), name
    torch.testing.assert_close(model.values, reference.values)
    allowed = torch.from_numpy(legal[:-1].reshape(-1, A))
    learnt, same = (each.logits.detach()[: len(allowed)] for each in (model, reference))
    torch.testing.assert_close(learnt[allowed], same[allowed])
    assert torch.equal(learnt[~allowed], torch.from_numpy(before).reshape(-1, A)[: len(allowed)][~allowed])
    assert isinstance(model, Table) and (learnt[allowed] != torch.from_numpy(logits[:-1].reshape(-1, A))[allowed]).any()


class OwnLoss(PPO):
    """A user's PPO whose loss reads the network's output without a mask of its own."""

    def loss(self, samples, output):
        lowest = torch.finfo(output.logits.dtype).min
        self.seen = output.logits.detach() == lowest
        assert torch.equal(self.seen, ~samples.legal)
        return super().loss(samples, output)


def test_a_loss_of_a_users_ppo_gets_logits_without_illegal_actions():
    batch, logits, values = random_unrolls(1)
    window = batch.window
    legal = np.random.default_rng(2).random(logits.shape) < 0.5
    legal[:-1] |= np.arange(A) == window.actions[:-1].numpy()[..., None]
    extras = {**window.extras, ACTION_MASK: torch.from_numpy(legal)}
    agent = table_agent(OwnLoss, logits, values, batch_size=80, **SETTINGS[PPO])
    agent.spec = replace(agent.spec, has_action_mask=True)
    agent.learn(batch._replace(window=window._replace(extras=extras)))
    assert agent.seen.any()


BOUND = np.ones(1, np.float32)
MIXED = replace(SPEC, action=Mixed((2, 2), -BOUND, BOUND))  # as many logits as random_unrolls has, and two moments
MIXED_SETTINGS = {**SETTINGS, Impala: {**SETTINGS[Impala], "relevance": "kl"}}


@pytest.mark.parametrize("agent_class", MIXED_SETTINGS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_an_update_of_mixed_actions_equals_one_whose_illegal_choices_are_impossible(agent_class, on_policy):
    batch, logits, values = random_unrolls(1)
    batch, window = batch._replace(on_policy=on_policy), batch.window
    draw, shape = np.random.default_rng(2), logits.shape[:2]
    taken = draw.integers(2, size=(*shape, 2))
    legal = draw.random(logits.shape) < 0.5
    np.put_along_axis(legal, taken + [0, 2], True, -1)
    of_policy, of_behaviour = draw.normal(size=(2, *shape, 2))
    behaviour, lowest = window.extras["logits"].numpy(), np.finfo(np.float64).min  # as `act` stores them
    drawn = torch.from_numpy(np.concatenate([taken, draw.normal(size=(*shape, 1))], -1))
    results = []
    for masked in (True, False):
        table = np.concatenate([logits if masked else np.where(legal, logits, -1e4), of_policy], -1)
        stored = np.concatenate([np.where(legal, behaviour, lowest if masked else -1e4), of_behaviour], -1)
        stored[-1] = np.nan
        extras = {"value": window.extras["value"], "logits": torch.from_numpy(stored), "drawn_action": drawn}
        extras |= {ACTION_MASK: torch.from_numpy(legal)} if masked else {}
        settings = {"batch_size": 80, "entropy_cost": 0.05, "optimizer": "adam", "learning_rate": 0.02}
        params = table_agent(agent_class, logits, values, **settings, **MIXED_SETTINGS[agent_class]).params
        agent = agent_class(params, replace(MIXED, has_action_mask=masked), lambda table=table: Table(table, values))
        agent.init_learner()
        torch.manual_seed(3)  # PPO's minibatches
        statistics = agent.learn(batch._replace(window=window._replace(extras=extras))).statistics
        results.append(({name: float(value) for name, value in statistics.items()}, agent.model, table))
    (found, model, before), (expected, reference, _) = results
    assert found.keys() == expected.keys() and all(np.isfinite(list(found.values())))
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-7, abs=1e-9), name
    torch.testing.assert_close(model.values, reference.values)
    moments = np.ones_like(of_policy[:-1], bool)
    allowed = torch.from_numpy(np.concatenate([legal[:-1], moments], -1).reshape(-1, A + 2))
    learnt, same = (each.logits.detach()[: len(allowed)] for each in (model, reference))
    torch.testing.assert_close(learnt[allowed], same[allowed])
    old = torch.from_numpy(before).reshape(-1, A + 2)[: len(allowed)]
    assert torch.equal(learnt[~allowed], old[~allowed])
    assert (learnt != old)[:, :A].any() and (learnt != old)[:, A:].any()


@pytest.mark.parametrize("agent_class", MIXED_SETTINGS)
def test_mixed_actions_have_legal_choices_and_any_numbers(agent_class):
    draw = np.random.default_rng(5)
    legal = draw.random((30, A)) < 0.5
    legal[:, [1, 2]] |= ~legal.reshape(30, 2, 2).any(2)
    table = np.concatenate([np.where(legal, -50.0, 50.0), draw.normal(size=(30, 2))], 1)[:, None]
    params = table_agent(agent_class, table[..., :A], table[..., 0]).params
    agent = agent_class(params, replace(MIXED, has_action_mask=True), lambda: Table(table, table[..., 0]))
    zeros, flags = np.zeros(30, np.float32), np.zeros(30, bool)
    timestep = TimeStep(np.arange(30)[:, None], zeros, zeros + 1, flags, flags, zeros, legal)
    exploration, numbers = agent.exploration(0, 1, 30, np.random.default_rng(7)), []
    for chosen in (None, *[exploration] * 50):
        output = agent.act(timestep, (), chosen)
        choices = output.action[:, :2].astype(np.int64)
        assert np.take_along_axis(legal, choices + [0, 2], 1).all()
        numbers.append(output.action[:, 2])
    assert np.unique(numbers).size > 500 and np.abs(numbers).max() <= 1
    assert (output.extras["logits"][:, :A][~legal] == np.finfo(np.float64).min).all()
    output, _ = agent.model(torch.arange(30)[:, None], ())
    greedy = agent.greedy(output, torch.from_numpy(legal))["action"][:, :2].long().numpy()
    assert np.take_along_axis(legal, greedy + [0, 2], 1).all()
