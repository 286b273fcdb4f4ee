"""Random unrolls for a tabular actor-critic, and the papers' sums over them, step by step in float64.

Every step of an unroll is a state of its own, so the gradient of the tables shows each step's contribution to the loss.
"""

from dataclasses import replace
from math import log

import numpy as np
import torch
from torch import nn

from core.model import Model
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import ActorCriticOutput, Batch, SampleIds, Window

A = 4
SPEC = EnvSpec("table", ArraySpec((1,), "int64"), 0, Discrete(A))


class Table(Model):
    """Hold logits and value of each state; an observation is the state's number and the logits are the features."""

    output_kind, observations = "actor-critic", "vector"
    feature_size = A

    def __init__(self, logits, values):
        """Store logits [..., A] and values [...], with states in the order of their steps."""
        super().__init__(None, SPEC)
        self.logits = nn.Parameter(torch.tensor(logits).flatten(0, -2))
        self.values = nn.Parameter(torch.tensor(values).flatten())

    def forward(self, observation, state):
        states = observation[:, 0]
        return ActorCriticOutput(self.logits[states], self.values[states], self.logits[states]), state


def table_agent(agent_class, logits, values, **settings):
    """Return an agent with `logits` [T + 1, B, A] and `values` [T + 1, B] for the steps of one batch."""
    params = replace(agent_class.Params(gamma=0.9, clip_norm=0.0, unroll_length=len(values) - 1), **settings)
    agent = agent_class(params, SPEC, lambda: Table(logits, values))
    agent.init_learner()
    return agent


def make_batch(rewards, discounts, lasts, actions, behaviour_logits, behaviour_values, fresh=None):
    """Return a batch; all arguments are [T, B, ...], except lasts [T + 1, B].

    The fields of the bootstrap step that are not published are filled with invalid values.
    """
    rows, streams = lasts.shape
    firsts = np.concatenate([np.zeros((1, streams), bool), lasts[:-1]])
    states = np.arange(rows * streams).reshape(rows, streams, 1)

    def padded(array, garbage):
        return torch.from_numpy(np.concatenate([array, np.full_like(array[:1], garbage)]))

    window = Window(
        torch.from_numpy(states),
        torch.from_numpy(firsts),
        torch.from_numpy(lasts),
        padded(actions, -7),
        padded(rewards, np.nan),
        padded(discounts, np.nan),
        {"logits": padded(behaviour_logits, np.nan), "value": padded(behaviour_values, np.nan)},
    )
    return Batch(
        window,
        SampleIds(np.zeros(streams, np.int64), np.arange(streams)),
        torch.ones(streams),
        None if fresh is None else torch.from_numpy(fresh),
    )


def random_unrolls(seed, length=7, streams=80):
    """Return a batch and tables (logits, values) far from its behaviour.

    The unrolls are fresh or replayed and contain terminations, truncations and lost lives.
    """
    generator = np.random.default_rng(seed)
    lasts = generator.random((length + 1, streams)) < 0.2
    for t in range(length):
        lasts[t + 1] &= ~lasts[t]  # the step after an end starts an episode
    discounts = np.where(generator.random((length, streams)) < 0.05, 0.0, 1.0)  # a lost life
    discounts[lasts[1:] & (generator.random((length, streams)) < 0.5)] = 0.0  # half of the ends are terminations
    rewards = generator.normal(size=(length, streams))
    rewards[lasts[:-1]] = np.nan  # no action was taken there
    batch = make_batch(
        rewards,
        discounts,
        lasts,
        generator.integers(A, size=(length, streams)),
        generator.normal(size=(length, streams, A)),
        generator.normal(size=(length, streams)),
        generator.random(streams) < 0.5,
    )
    return batch, generator.normal(size=(length + 1, streams, A)), generator.normal(size=(length + 1, streams))


# the papers' sums -------------------------------------------------------------------------------------------------
def softmax(logits):
    powers = np.exp(logits)
    return powers / powers.sum()


def divergence(p, q):
    """Return KL(p || q) of two probability vectors."""
    return sum(p[a] * log(p[a] / q[a]) for a in range(len(p)))


def vtrace_targets(ratios, rewards, discounts, values, included, rho_bar, c_bar, trace_lambda):
    """Return v_0 .. v_T of one environment.

    v_s = V_s + sum_{t >= s} (prod_{s <= i < t} g_i c_i) rho_t (r_t + g_t V_{t+1} - V_t), up to an excluded step.
    """
    targets = list(values)
    for s in range(len(rewards)):
        product = 1.0
        for t in range(s, len(rewards)):
            if not included[t]:
                break
            targets[s] += product * min(rho_bar, ratios[t]) * (rewards[t] + discounts[t] * values[t + 1] - values[t])
            product *= discounts[t] * trace_lambda * min(c_bar, ratios[t])
    return targets


class Sum:
    """Accumulate a loss and its gradient to the tables, step by step."""

    def __init__(self, rows, streams):
        self.loss = 0.0
        self.to_logits, self.to_values = np.zeros((rows, streams, A)), np.zeros((rows, streams))

    def add(self, row, term, to_logits=0.0, to_value=0.0):
        self.loss += term
        self.to_logits[row] += to_logits
        self.to_values[row] += to_value

    def add_baseline(self, row, cost, value, target):
        self.add(row, cost * 0.5 * (target - value) ** 2, to_value=-cost * (target - value))

    def add_entropy(self, row, cost, pi):
        """Add the entropy term; d (sum pi log pi) / dz = pi (log pi - sum pi log pi)."""
        total = (pi * np.log(pi)).sum()
        self.add(row, cost * total, to_logits=cost * pi * (np.log(pi) - total))

    def assert_is_that_of(self, agent, output):
        """Assert that an update gave this loss and gradient."""
        np.testing.assert_allclose(float(output.statistics["loss"]), self.loss, rtol=1e-10)
        np.testing.assert_allclose(agent.model.logits.grad.numpy(), self.to_logits.reshape(-1, A), atol=1e-12)
        np.testing.assert_allclose(agent.model.values.grad.numpy(), self.to_values.flatten(), atol=1e-12)


def columns(batch):
    """Return a batch's steps 0 .. T - 1 as numpy arrays, and lasts [T + 1, B].

    The arrays are actions, rewards, discounts, behaviour logits and behaviour values.
    """
    window = batch.window
    rows = (window.actions, window.rewards, window.discounts, window.extras["logits"], window.extras["value"])
    return [tensor[:-1].numpy() for tensor in rows], window.lasts.numpy()


def differences(first, second, path=""):
    """Return the paths at which two nested states differ in any bit."""
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        return [found for key in first for found in differences(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, (list, tuple)):
        return [
            found
            for number, pair in enumerate(zip(first, second, strict=True))
            for found in differences(*pair, f"{path}/{number}")
        ]
    same = torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
    return [] if same else [path]
