"""Several updates of each control agent equal a plain loop over the papers' equations, with torch's Adam in float64.

A single step is tested beside each part. Here the order counts: the policy's step reads the critic after its step, the
temperature follows the policy, and targets follow both.
"""

from copy import deepcopy
from math import log, pi

import pytest
import torch
import torch.nn.functional as F

from tests.core.agents.control_agents import KINDS, make_agent, make_batch

GAMMA, TAU, ATOMS, UPDATES = 0.9, 0.3, 11, 5
RATES = {"learning_rate": 2e-3, "critic_learning_rate": 3e-3}


def make_float64(kind):
    agent = make_agent(kind, learner=False, gamma=GAMMA, target_update_tau=TAU, **RATES)
    agent.model.double()
    agent.model.preprocess = lambda observation: observation
    agent.init_learner()
    return agent


def float64_batch(agent, seed):
    """Return a batch of which the first three transitions terminate."""
    batch = make_batch(agent, seed=seed)
    window = batch.window
    window.discounts[0, :3] = 0
    names = "observations", "actions", "rewards", "discounts"
    doubles = {name: getattr(window, name).double() for name in names}
    return batch._replace(window=window._replace(**doubles), weights=batch.weights.double())


def gaussian_action(output, noise):
    """Return SAC's action and the logarithm of its density, by the change of variables."""
    mean, log_deviation = output.chunk(2, 1)
    log_deviation = log_deviation.clamp(-20, 2)
    action = torch.tanh(mean + log_deviation.exp() * noise)
    normal = -(noise**2) / 2 - log_deviation - log(2 * pi) / 2
    return action, (normal - torch.log(1 - action**2)).sum(1)


def projected(probabilities, rewards, discounts):
    """Return C51's projection on atoms from -5 to 5, atom by atom."""
    mass = torch.zeros_like(probabilities)
    for sample, row in enumerate(probabilities):
        for atom, probability in zip(range(-5, 6), row):
            position = float((rewards[sample] + discounts[sample] * atom).clamp(-5, 5)) + 5
            lower = min(int(position), ATOMS - 2)
            mass[sample, lower] += probability * (lower + 1 - position)
            mass[sample, lower + 1] += probability * (position - lower)
    return mass


class Loop:
    """The reference: networks, targets, three Adams, and one method for an update."""

    def __init__(self, kind, agent):
        self.kind, self.period = kind, 2 if kind == "td3" else 1
        self.policy, self.critic = deepcopy(agent.model.policy), deepcopy(agent.model.critic)
        self.targets = [deepcopy(network) for network in (self.policy, self.critic)]
        self.log_temperature = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.policy_adam = torch.optim.Adam(self.policy.parameters(), RATES["learning_rate"])
        self.critic_adam = torch.optim.Adam(self.critic.parameters(), RATES["critic_learning_rate"])
        self.temperature_adam = torch.optim.Adam([self.log_temperature], RATES["learning_rate"])

    def update(self, number, window):
        state, next_state = window.observations
        taken, rewards, discounts = window.actions[0], window.rewards[0], GAMMA * window.discounts[0]
        with torch.no_grad():
            bootstrap = self.bootstrap(next_state)
        outputs = self.critic(state, taken)
        if self.kind == "d4pg":
            target = projected(bootstrap, rewards, discounts)
            critic_loss = -(target * outputs[0].log_softmax(1)).sum(1).mean()
        else:
            target = rewards + discounts * bootstrap
            critic_loss = sum(F.mse_loss(values[:, 0], target) for values in outputs)
        minimise(self.critic_adam, critic_loss)
        if number % self.period:
            return
        loss, log_density = self.policy_loss(state)
        minimise(self.policy_adam, loss)
        if log_density is not None:
            minimise(self.temperature_adam, -self.log_temperature * (log_density - taken.shape[1]).mean())
        for target, online in zip(self.targets, (self.policy, self.critic)):
            for old, new in zip(target.parameters(), online.parameters()):
                old.data = (1 - TAU) * old.data + TAU * new.data

    def bootstrap(self, state):
        target_policy, target_critic = self.targets
        if self.kind == "sac":
            output = self.policy(state)
            action, log_density = gaussian_action(output, torch.randn_like(output[:, :3]))
            return target_critic(state, action)[:, :, 0].amin(0) - self.log_temperature.exp() * log_density
        action = target_policy(state)
        if self.kind == "td3":
            action = (action + (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)).clamp(-1, 1)
        outputs = target_critic(state, action)
        return outputs[0].softmax(1) if self.kind == "d4pg" else outputs[:, :, 0].amin(0)

    def policy_loss(self, state):
        """Return the loss, and SAC's logarithms of densities."""
        output = self.policy(state)
        if self.kind == "sac":
            action, log_density = gaussian_action(output, torch.randn_like(output[:, :3]))
            values = self.critic(state, action)[:, :, 0].amin(0)
            return (self.log_temperature.exp().detach() * log_density - values).mean(), log_density.detach()
        first = self.critic(state, output)[0]
        atoms = torch.arange(-5.0, 6.0, dtype=torch.float64)
        return -(first.softmax(1) @ atoms if self.kind == "d4pg" else first[:, 0]).mean(), None


def minimise(adam, loss):
    adam.zero_grad()
    loss.backward()
    adam.step()


@pytest.mark.parametrize("kind", KINDS)
def test_several_updates_equal_a_plain_loop(kind):
    agent = make_float64(kind)
    loop, before = Loop(kind, agent), agent.online_vectors.both.clone()
    for network in (loop.policy, loop.critic):
        network.requires_grad_(True)
    for number in range(1, UPDATES + 1):
        batch = float64_batch(agent, number)
        torch.manual_seed(number)
        assert not agent.learn(batch).skipped
        torch.manual_seed(number)
        loop.update(number, batch.window)
    assert (agent.online_vectors.both - before).abs().max() > 1e-3
    found = agent.model.policy, agent.model.critic, agent.target.policy, agent.target.critic
    for network, expected in zip(found, (loop.policy, loop.critic, *loop.targets), strict=True):
        for parameter, truth in zip(network.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, truth, atol=1e-8, rtol=0)
    if kind == "sac":
        assert float(agent.log_temperature.detach()) == pytest.approx(float(loop.log_temperature.detach()), abs=1e-6)
        assert abs(float(agent.log_temperature.detach())) > 1e-3
