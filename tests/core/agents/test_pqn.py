"""PQN equals the paper's recursion and losses written step by step in float64, and learns from what it says it does."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from core.agents.pqn import PQN
from core.model import Model
from core.types import ACTION_MASK, SampleIds
from tests.core.agents.unrolls import SPEC, A, random_unrolls
from tests.core.learning.test_radam import RAdamTwin
from tests.reliability.test_inline import train

LENGTH, STREAMS, GAMMA, LAMBDA, RATE, EPS = 7, 20, 0.9, 0.65, 0.03, 1e-6


class Table(Model):
    """Hold the action values of each state; an observation is the state's number."""

    output_kind, observations = "q", "vector"

    def __init__(self, values):
        super().__init__(None, SPEC)
        self.values = nn.Parameter(torch.tensor(values).flatten(0, 1))

    def forward(self, observation, state=()):
        return self.values[observation[:, 0]], state


def table_agent(values, **settings):
    """Return an agent with `values` [T + 1, B, A] for the steps of one batch."""
    params = replace(PQN.Params(gamma=GAMMA, trace_lambda=LAMBDA, unroll_length=LENGTH, batch_size=STREAMS), **settings)
    agent = PQN(params, SPEC, lambda: Table(values))
    agent.init_learner()
    return agent


def rollout(seed):
    """Return a batch with terminations and truncations inside, and action values by which its actors acted."""
    batch, values, _ = random_unrolls(seed, length=LENGTH, streams=STREAMS)
    q_max = values.max(2)
    q_max[-1] = np.nan  # the bootstrap step's is not published
    window = batch.window._replace(extras={"q_max": torch.from_numpy(q_max)})
    ends = window.lasts[1:-1]
    assert set(window.discounts[: LENGTH - 1][ends].tolist()) == {0.0, 1.0}  # terminations and truncations inside
    return batch._replace(window=window, on_policy=True), values


def recursive_returns(batch, values):
    """Return G_t = r_t + g_t ((1 - lambda) max Q(s_{t+1}) + lambda G_{t+1}) of each step [T, B].

    At the end of the rollout or of an episode, which has no action, G is max Q of the observation there.
    """
    rewards, discounts, lasts = (
        field.numpy() for field in (batch.window.rewards, batch.window.discounts, batch.window.lasts)
    )
    best = values.max(2)
    returns = best.copy()
    for b in range(STREAMS):
        for t in reversed(range(LENGTH)):
            if not lasts[t, b]:
                mixed = (1 - LAMBDA) * best[t + 1, b] + LAMBDA * returns[t + 1, b]
                returns[t, b] = rewards[t, b] + GAMMA * discounts[t, b] * mixed
    return returns[:-1]


@pytest.mark.parametrize("settings", [{"epochs": 1, "minibatches": 1}, {"epochs": 3, "minibatches": 4}])
@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_an_update_equals_the_slow_sums(settings, clip_norm):
    batch, values = rollout(1)
    actions, lasts = batch.window.actions.numpy(), batch.window.lasts.numpy()
    agent = table_agent(values, learning_rate=RATE, optimizer_eps=EPS, clip_norm=clip_norm, **settings)
    torch.manual_seed(5)
    orders = [torch.rand(LENGTH * STREAMS).argsort().numpy() for _ in range(settings["epochs"])]
    torch.manual_seed(5)
    output = agent.learn(batch)
    targets, table, norms = recursive_returns(batch, values), values.reshape(-1, A).copy(), []
    radam = RAdamTwin(table, RATE, EPS)
    for order in orders:
        for part in np.array_split(order, settings["minibatches"]):
            steps = [divmod(int(state), STREAMS) for state in part]
            steps = [(t, b) for t, b in steps if not lasts[t, b]]
            gradient = np.zeros_like(table)
            for t, b in steps:  # of (target - q)^2 / 2, mean over the steps with an action
                state = t * STREAMS + b, actions[t, b]
                gradient[state] -= (targets[t, b] - table[state]) / len(steps)
            norms.append((gradient**2).sum() ** 0.5)
            radam.step(gradient * (min(1.0, clip_norm / (norms[-1] + 1e-6)) if clip_norm else 1.0))
    assert not output.skipped and output.priorities is None
    np.testing.assert_allclose(agent.model.values.detach().numpy(), table, atol=1e-9)
    assert float(output.statistics["grad_norm"]) == pytest.approx(np.mean(norms), rel=1e-6)
    assert abs(table - values.reshape(-1, A)).max() > 1e-4


def test_an_update_equals_one_whose_illegal_actions_are_worthless():
    batch, values = rollout(4)
    legal = np.random.default_rng(4).random(values.shape) < 0.5
    legal[:-1] |= np.arange(A) == batch.window.actions[:-1].numpy()[..., None]
    legal[-1, :, 1] |= ~legal[-1].any(1)
    q_max = torch.from_numpy(np.where(legal, values, -np.inf).max(2))
    q_max[-1] = torch.nan
    learnt = []
    for masked, worth in ((True, 60.0), (False, -60.0)):
        agent = table_agent(np.where(legal, values, worth), learning_rate=RATE, epochs=2, minibatches=3)
        agent.spec = replace(SPEC, has_action_mask=masked)
        extras = {"q_max": q_max, **({ACTION_MASK: torch.from_numpy(legal)} if masked else {})}
        torch.manual_seed(5)
        assert not agent.learn(batch._replace(window=batch.window._replace(extras=extras))).skipped
        learnt.append(agent.model.values.detach().reshape(legal.shape))
    found, expected = learnt
    allowed = torch.from_numpy(legal)
    torch.testing.assert_close(found[allowed], expected[allowed])
    assert (found[~allowed] == 60).all() and (found - torch.from_numpy(values))[allowed].abs().max() > 1e-3


def test_a_rollout_with_an_infinite_reward_is_skipped():
    batch, values = rollout(2)
    agent, (t, b) = table_agent(values), (~batch.window.lasts[:-1]).nonzero()[0].tolist()
    batch.window.rewards[t, b] = torch.inf
    assert agent.learn(batch).skipped
    assert torch.equal(agent.model.values, torch.tensor(values).flatten(0, 1))


INLINE = (
    *("--config", "pqn-cartpole", "--engine", "inline", "--machine", "test", "--num_actors", "2"),
    *("--num_envs_per_actor", "2", "--agent.unroll_length", "8", "--agent.epochs", "3", "--agent.minibatches", "2"),
    *("--agent.learning_rate", "1e-2", "--evaluator.period", "1e9", "--evaluator.episodes", "1"),
)


def test_each_unroll_is_learnt_from_exactly_epochs_times(tmp_path, monkeypatch):
    rollouts, uses, moved, learn, loss = [], Counter(), [], PQN.learn, PQN._loss

    def values_of(agent, window):
        with torch.no_grad():
            return agent.model(window.observations[:-1].flatten(0, 1))[0].amax(1).reshape(8, 4)

    def checked_learn(agent, batch):
        window, before = batch.window, values_of(agent, batch.window)
        torch.testing.assert_close(window.extras["q_max"][:-1], before, rtol=1e-5, atol=1e-6)
        assert isinstance(batch.keys, SampleIds) and batch.keys.env_ids.tolist() == [0, 1, 2, 3]
        rollouts.append(batch.keys.step_ids.tolist())
        output = learn(agent, batch)
        moved.append(float((values_of(agent, window) - before).abs().max()))
        return output

    def counted_loss(agent, samples, part):
        uses.update((len(rollouts), *observation) for observation in samples.observations.tolist())
        return loss(agent, samples, part)

    monkeypatch.setattr(PQN, "learn", checked_learn)
    monkeypatch.setattr(PQN, "_loss", counted_loss)
    train(tmp_path, *INLINE, "--updates", "6")
    assert rollouts == [[8 * number] * 4 for number in range(6)]
    assert min(moved) > 1e-3  # so that values of another version would have been noticed
    assert len(uses) == 6 * 8 * 4 and set(uses.values()) == {3}
