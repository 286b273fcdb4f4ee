"""IQN's loss, priorities and targets equal slow twins in float64, and so do Munchausen's targets of every agent."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from core.agents.dqn import DQN
from core.agents.iqn import IQN
from core.agents.rainbow import Rainbow
from core.model import Model
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import Batch, QuantileInputs, SampleIds, TimeStep, Window

STATES, ACTIONS, QUANTILES, BATCH, N_STEP, GAMMA = 5, 3, 4, 32, 2, 0.9
ALPHA, TEMPERATURE, CLIP = 0.9, 0.3, -0.5
SPEC = EnvSpec("table", ArraySpec((1,), "float32"), 0, Discrete(ACTIONS))
GENERATOR = np.random.default_rng(2)
MUNCHAUSEN = {
    "munchausen_alpha": ALPHA,
    "munchausen_temperature": TEMPERATURE,
    "munchausen_clip": CLIP,
    "double_q": False,
}


class Table(Model):
    """Look numbers up by the state: values [A], quantiles [A, N], or a + b tau for each action."""

    observations = "vector"

    def __init__(self, *shape):
        super().__init__(None, SPEC)
        self.table = nn.Parameter(torch.from_numpy(GENERATOR.normal(0, 0.5, (STATES, ACTIONS, *shape))))

    def forward(self, inputs, state=()):
        if not isinstance(inputs, QuantileInputs):
            return self.table[inputs[:, 0].long()], state
        lines = self.table[inputs.observation[:, 0].long()]  # [B, A, 2]
        return lines[..., :1] + lines[..., 1:] * inputs.fractions[:, None], state


def make_agent(agent, *shape, **settings):
    made = agent(agent.Params(n_step=N_STEP, gamma=GAMMA, clip_norm=0.0, **settings), SPEC, lambda: Table(*shape))
    made.init_learner()
    made.target.table.data = Table(*shape).table.detach()  # unlike the online network
    return made


def make_batch():
    """Return windows of which some are terminated, truncated or cut after their first step."""
    states = torch.from_numpy(GENERATOR.integers(0, STATES, (2, BATCH, 1))).float()
    lasts = torch.zeros(N_STEP + 1, BATCH, dtype=torch.bool)
    lasts[1, ::4] = True
    discounts = torch.ones(N_STEP + 1, BATCH, dtype=torch.float64)
    discounts[0, ::8] = 0
    discounts[1, 1::5] = 0
    window = Window(
        states,
        torch.zeros_like(lasts),
        lasts,
        torch.from_numpy(GENERATOR.integers(0, ACTIONS, (N_STEP + 1, BATCH))),
        torch.from_numpy(GENERATOR.normal(size=(N_STEP + 1, BATCH))),
        discounts,
        {},
    )
    weights = torch.from_numpy(GENERATOR.random(BATCH))
    return Batch(window, SampleIds(np.zeros(BATCH, np.int64), np.arange(BATCH)), weights)


def returns_of(batch, column):
    """Return R and D of one window."""
    window, total, discount = batch.window, 0.0, 1.0
    for row in range(N_STEP):
        if window.lasts[row, column]:
            break
        total += discount * float(window.rewards[row, column])
        discount *= GAMMA * float(window.discounts[row, column])
    return total, discount


def log_policy(values):
    """Return t log pi [A]."""
    total = math.fsum(math.exp((value - max(values)) / TEMPERATURE) for value in values)
    return [value - max(values) - TEMPERATURE * math.log(total) for value in values]


def target_of(batch, column, final, chooser, munchausen=None):
    """Return the target's numbers [...] of one window.

    Args:
        final: [A, ...] numbers of the target network at the final observation.
        chooser: [A] values that choose an action among them.
        munchausen: [A] values of the target network at the first observation; None is the usual target.
    """
    total, discount = returns_of(batch, column)
    if munchausen is None:
        return total + discount * final[int(np.argmax(chooser))]
    values = final.reshape(ACTIONS, -1).mean(1)
    bonus = ALPHA * min(max(log_policy(munchausen)[int(batch.window.actions[0, column])], CLIP), 0.0)
    mixture = sum(math.exp(part / TEMPERATURE) * (final[a] - part) for a, part in enumerate(log_policy(values)))
    return total + bonus + discount * mixture


def states_of(batch, column):
    return [int(state) for state in batch.window.observations[:, column, 0]]


def quantile_loss(quantiles, fractions, target):
    total = 0.0
    for quantile, tau in zip(quantiles, fractions):
        for atom in target:
            error = atom - quantile
            huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5
            total += abs(tau - (error < 0)) * huber / len(target)
    return total


@pytest.mark.parametrize("settings", [{}, {"double_q": True}, MUNCHAUSEN])
def test_iqns_loss_and_priorities_equal_a_slow_twin(settings, monkeypatch):
    agent, batch = make_agent(IQN, 2, quantiles=4, target_quantiles=6, **settings), make_batch()
    drawn = []

    def draw(self, size, number):
        drawn.append(torch.rand(size, number, dtype=torch.float64))
        return drawn[-1]

    monkeypatch.setattr(IQN, "_draw_fractions", draw)
    found = agent.loss(batch)
    fractions = [part.numpy() for part in drawn]
    online, target = agent.model.table.detach().numpy(), agent.target.table.numpy()
    final_of_target, first_of_target = fractions[0], fractions[1] if settings == MUNCHAUSEN else None
    losses = []
    for column in range(BATCH):
        first, last = states_of(batch, column)

        def lines(table, state, taus, column=column):
            return table[state, :, :1] + table[state, :, 1:] * taus[column]  # [A, N]

        final = lines(target, last, final_of_target)
        chooser = lines(online, last, fractions[1]) if settings.get("double_q") else final
        values = None if first_of_target is None else lines(target, first, first_of_target).mean(1)
        numbers = target_of(batch, column, final, chooser.mean(1), values)
        taken = lines(online, first, fractions[-1])[int(batch.window.actions[0, column])]
        losses.append(quantile_loss(taken, fractions[-1][column], numbers))
    assert found.priorities.tolist() == pytest.approx(losses, rel=1e-9)
    assert float(found.loss.detach()) == pytest.approx(float(np.mean(batch.weights.numpy() * losses)), rel=1e-9)
    assert fractions[-1].shape == (BATCH, 4) and final_of_target.shape == (BATCH, 6)


def test_munchausen_dqn_equals_the_papers_sum():
    agent, batch = make_agent(DQN, loss="squared", **MUNCHAUSEN), make_batch()
    online, target = agent.model.table.detach().numpy(), agent.target.table.numpy()
    errors, clipped = [], 0
    for column in range(BATCH):
        first, last = states_of(batch, column)
        action = int(batch.window.actions[0, column])
        clipped += log_policy(target[first])[action] < CLIP
        errors.append(target_of(batch, column, target[last], None, target[first]) - online[first, action])
    found = agent.loss(batch)
    assert 0 < clipped < BATCH
    assert found.priorities.tolist() == pytest.approx(np.abs(errors).tolist(), rel=1e-9)
    expected = float(np.mean(batch.weights.numpy() * np.square(errors) / 2))
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-9)


def test_munchausen_quantiles_equal_the_papers_sum():
    agent, batch = make_agent(Rainbow, QUANTILES, distribution="quantile", **MUNCHAUSEN), make_batch()
    online, target = agent.model.table.detach().numpy(), agent.target.table.numpy()
    losses = []
    for column in range(BATCH):
        first, last = states_of(batch, column)
        numbers = target_of(batch, column, target[last], None, target[first].mean(1))
        taken = online[first, int(batch.window.actions[0, column])]
        losses.append(quantile_loss(taken, (np.arange(QUANTILES) + 0.5) / QUANTILES, numbers))
    assert agent.loss(batch).priorities.tolist() == pytest.approx(losses, rel=1e-9)


def test_iqn_acts_by_the_mean_of_its_quantiles():
    agent = make_agent(IQN, 7)
    step = TimeStep(np.arange(STATES, dtype=np.float32)[:, None], *[np.zeros(STATES)] * 5)
    output = agent.act(step, (), None)
    means = agent.model.table.detach().numpy().mean(2)
    assert output.action.tolist() == means.argmax(1).tolist()
    np.testing.assert_allclose(output.extras["q_max"], means.max(1))
    assert torch.equal(agent.greedy(agent.model.table)["action"], torch.from_numpy(output.action))
