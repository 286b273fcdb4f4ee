"""PPO equals the papers' sums written step by step, in float64, and learns from what it says it does."""

from collections import Counter
from functools import partial
from math import exp, log
from typing import NamedTuple

import numpy as np
import pytest
import torch

from core.agents.ppo import MAX_REWARD, PPO
from core.models.actor_critic import MLPAC, MLPACParams
from core.specs import ArraySpec, Continuous, EnvSpec
from core.types import TimeStep
from tests.core.agents.unrolls import SPEC, A, Table, columns, random_unrolls, softmax, table_agent, vtrace_targets
from tests.core.learning import test_staged_update
from tests.reliability.test_inline import train

SETTINGS = {
    "one gradient": {"epochs": 1, "minibatches": 1, "normalize_advantages": False, "clip_norm": 0.0},
    "minibatches": {"epochs": 3, "minibatches": 4},
    "asynchronous": {"epochs": 2, "minibatches": 3, "rho_bar": 1.4, "c_bar": 0.8, "gae_lambda": 0.9},
    "plain values, all clips": {
        "epochs": 2,
        "minibatches": 2,
        "value_clipping": False,
        "clip_epsilon": 0.1,
        "entropy_cost": 0.1,
        "baseline_cost": 0.8,
        "clip_norm": 0.01,
    },
    "stopped by the KL": {"epochs": 4, "minibatches": 2, "target_kl": 1e-6},
}
LEARNING_RATE, EPS = 0.03, 1e-5


def advantages_and_targets(params, batch, logits, values):
    """Return GAE (1506.02438, equation 16), or its V-trace form, and value targets, by sums over the rest."""
    (actions, rewards, discounts, behaviour_logits, behaviour_values), lasts = columns(batch)
    length, streams = actions.shape
    advantages, targets, old = (np.zeros((length, streams)) for _ in range(3))
    for b in range(streams):
        included = [not lasts[t, b] for t in range(length)]
        v = [*(behaviour_values if batch.on_policy else values)[:length, b], values[length, b]]
        g = [params.gamma * discounts[t, b] for t in range(length)]
        old[:, b] = v[:length]
        if batch.on_policy:
            for s in range(length):
                product = 1.0
                for t in range(s, length):
                    if not included[t]:
                        break
                    advantages[s, b] += product * (rewards[t, b] + g[t] * v[t + 1] - v[t])
                    product *= g[t] * params.gae_lambda
            targets[:, b] = old[:, b] + advantages[:, b]
            continue
        pi, mu = ([softmax(table[t, b]) for t in range(length)] for table in (logits, behaviour_logits))
        ratios = [pi[t][actions[t, b]] / mu[t][actions[t, b]] for t in range(length)]
        clips = params.rho_bar, params.c_bar, params.gae_lambda
        corrected = vtrace_targets(ratios, rewards[:, b], g, v, included, *clips)
        targets[:, b] = corrected[:length]
        for t in range(length):
            if included[t]:
                mixed = params.gae_lambda * corrected[t + 1] + (1 - params.gae_lambda) * v[t + 1]
                advantages[t, b] = rewards[t, b] + g[t] * mixed - v[t]
    return advantages, targets, old


def test_a_schedule_needs_a_length():
    agent = table_agent(PPO, np.zeros((2, 1, A)), np.zeros((2, 1)))
    agent.params = agent.Params(batch_size=1, lr_schedule="step")
    with pytest.raises(ValueError, match="lr_schedule=step needs lr_schedule_updates"):
        agent.init_learner()


class Adam:
    """Adam (1412.6980, algorithm 1) on one array."""

    def __init__(self, array):
        self.array, self.moment, self.square, self.steps = array, np.zeros_like(array), np.zeros_like(array), 0

    def step(self, gradient):
        self.steps += 1
        self.moment = 0.9 * self.moment + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        moment, square = self.moment / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        self.array -= LEARNING_RATE * moment / (np.sqrt(square) + EPS)


def twin(params, batch, logits, values, orders):
    """Return the tables after an update, and the gradients of each minibatch before clipping."""
    (actions, _, _, behaviour_logits, _), lasts = columns(batch)
    length, streams = actions.shape
    advantages, targets, old = advantages_and_targets(params, batch, logits, values)
    z, v = logits.copy().reshape(-1, A), values.copy().flatten()
    adams, gradients = (Adam(z), Adam(v)), []
    for order in orders:
        for part in np.array_split(order, params.minibatches):
            steps = [divmod(int(state), streams) for state in part]
            steps = [(t, b) for t, b in steps if not lasts[t, b]]
            scaled = {step: advantages[step] for step in steps}
            if params.normalize_advantages:
                mean = sum(scaled.values()) / len(steps)
                deviation = (sum((each - mean) ** 2 for each in scaled.values()) / (len(steps) - 1)) ** 0.5
                scaled = {step: (each - mean) / (deviation + 1e-8) for step, each in scaled.items()}
            to_z, to_v, kl = np.zeros_like(z), np.zeros_like(v), 0.0
            for (t, b), advantage in scaled.items():
                state, action = t * streams + b, actions[t, b]
                pi, mu = softmax(z[state]), softmax(behaviour_logits[t, b])
                ratio, clip = pi[action] / mu[action], params.clip_epsilon
                kl += (ratio - 1 - log(ratio)) / len(steps)
                held = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
                if not held:
                    to_z[state] -= ratio * advantage * (np.eye(A)[action] - pi) / len(steps)
                to_z[state] += params.entropy_cost * pi * (np.log(pi) - (pi * np.log(pi)).sum()) / len(steps)
                error, moved = v[state] - targets[t, b], v[state] - old[t, b]
                bounded = old[t, b] + max(-clip, min(clip, moved)) - targets[t, b]
                if not params.value_clipping or abs(moved) < clip or error**2 > bounded**2:
                    to_v[state] += params.baseline_cost * error / len(steps)
            gradients.append((to_z, to_v))
            norm = ((to_z**2).sum() + (to_v**2).sum()) ** 0.5
            scale = min(1.0, params.clip_norm / (norm + 1e-6)) if params.clip_norm else 1.0
            adams[0].step(to_z * scale), adams[1].step(to_v * scale)
        if params.target_kl and kl > params.target_kl:
            break
    return z, v, gradients


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_equals_the_slow_sums(name):
    batch, logits, values = random_unrolls(3, length=6, streams=10)
    batch = batch._replace(on_policy=name != "asynchronous")
    settings = {"learning_rate": LEARNING_RATE, "optimizer_eps": EPS, "batch_size": 10, "clip_norm": 0.5}
    agent = table_agent(PPO, logits, values, **{**settings, **SETTINGS[name]})
    torch.manual_seed(5)
    orders = [torch.rand(60).argsort().numpy() for _ in range(agent.params.epochs)]
    z, v, gradients = twin(agent.params, batch, logits, values, orders)
    torch.manual_seed(5)
    output = agent.learn(batch)
    assert not output.skipped
    np.testing.assert_allclose(agent.model.logits.detach().numpy(), z, atol=1e-9)
    np.testing.assert_allclose(agent.model.values.detach().numpy(), v, atol=1e-9)
    norms = [((to_z**2).sum() + (to_v**2).sum()) ** 0.5 for to_z, to_v in gradients]
    assert float(output.statistics["grad_norm"]) == pytest.approx(np.mean(norms), rel=1e-6)
    _, targets, old = advantages_and_targets(agent.params, batch, logits, values)
    acted = ~columns(batch)[1][:-1]
    unexplained = (targets - old)[acted].var() / targets[acted].var()
    assert float(output.statistics["explained_variance"]) == pytest.approx(1 - unexplained)
    epochs = len(gradients) / agent.params.minibatches
    assert float(output.statistics["epochs"]) == epochs
    assert (epochs < agent.params.epochs) == (name == "stopped by the KL")
    assert (abs(z - logits.reshape(-1, A)) > 1e-3).any() and (abs(v - values.flatten()) > 1e-3).any()


class TwoValues(NamedTuple):
    logits: torch.Tensor
    value: torch.Tensor
    features: torch.Tensor
    second: torch.Tensor


class TwoValueTable(Table):
    """The second value is twice the number of the state."""

    def forward(self, observation, state):
        output, state = super().forward(observation, state)
        return TwoValues(*output, 2.0 * observation[:, 0]), state


class TwoValuePPO(PPO):
    @property
    def extras(self):
        return {**super().extras, "second": ArraySpec((), "float32")}

    def samples(self, window, on_policy):
        samples, statistics = super().samples(window, on_policy)
        return samples._replace(extras={"number": window.observations[:-1, :, 0]}), statistics

    def loss(self, samples, output):
        assert torch.equal(samples.extras["number"], samples.observations[..., 0])
        loss = super().loss(samples, output)
        second = (samples.weights * (output.second - samples.extras["number"])).sum()
        return loss._replace(loss=loss.loss + second, statistics={**loss.statistics, "second": second})


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_subclass_adds_fields_to_output_samples_and_loss(minibatches):
    batch, logits, values = random_unrolls(3, length=6, streams=10)
    params = TwoValuePPO.Params(batch_size=10, unroll_length=6, minibatches=minibatches)
    agent = TwoValuePPO(params, SPEC, lambda: TwoValueTable(logits, values))
    agent.init_learner()
    step = TimeStep(np.array([[4], [7]]), *[np.zeros(2)] * 5)
    stored = agent.act(step, (), None).extras
    assert agent.extras.keys() <= stored.keys() and stored["second"].tolist() == [8, 14]
    plain = table_agent(PPO, logits, values, batch_size=10, minibatches=minibatches, gamma=0.99, clip_norm=0.5)
    torch.manual_seed(5)
    output = agent.learn(batch)
    torch.manual_seed(5)
    expected = plain.learn(batch).statistics
    assert float(output.statistics["second"]) > 0
    loss = expected["loss"] + output.statistics["second"]
    torch.testing.assert_close(output.statistics["loss"], loss)


def test_a_stopped_update_counts_all_its_steps_in_the_schedule():
    batch, logits, values = random_unrolls(3, length=6, streams=10)
    settings = {"lr_schedule": "linear", "lr_schedule_updates": 4, "learning_rate": 1.0, "target_kl": 1e-6}
    agent = table_agent(PPO, logits, values, batch_size=10, epochs=3, **settings)
    rates = [float(agent.learn(batch).statistics["lr"]) for _ in range(4)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_an_update_that_skips_its_first_step_alone_is_skipped(monkeypatch):
    batch, logits, values = random_unrolls(3, length=6, streams=10)
    agent = table_agent(PPO, logits, values, batch_size=10, epochs=1, minibatches=2)
    loss, factors = PPO._loss, iter([torch.nan, 1.0])

    def faulty_loss(self, samples, part):
        found = loss(self, samples, part)
        return found._replace(loss=found.loss * next(factors))

    monkeypatch.setattr(PPO, "_loss", faulty_loss)
    before = [parameter.clone() for parameter in agent.model.parameters()]
    assert agent.learn(batch).skipped
    assert not all(map(torch.equal, before, agent.model.parameters()))  # the second step was taken


def test_ratios_that_floats_cannot_hold_skip_no_update():
    batch, logits, values = random_unrolls(3, length=6, streams=10)
    agent = table_agent(PPO, logits, values, batch_size=10)
    batch.window.extras["logits"][:-1].scatter_(2, batch.window.actions[:-1, :, None], -1_000.0)
    assert not agent.learn(batch).skipped


@pytest.mark.parametrize("minibatches", [1, 3, 60])
def test_minibatches_have_every_step_once_an_epoch(monkeypatch, minibatches):
    batch, logits, values = random_unrolls(4, length=6, streams=10)
    agent = table_agent(PPO, logits, values, batch_size=10, epochs=2, minibatches=minibatches)
    seen, loss = [], PPO._loss
    monkeypatch.setattr(PPO, "_loss", lambda self, samples, part: (seen.append(samples), loss(self, samples, part))[1])
    assert not agent.learn(batch).skipped  # though some of 60 minibatches have no action
    assert len(seen) == 2 * minibatches
    lasts = batch.window.lasts[:-1].flatten()
    for epoch in (seen[:minibatches], seen[minibatches:]):
        states = torch.cat([samples.observations.flatten() for samples in epoch])
        assert sorted(states.tolist()) == list(range(60))
        weights = torch.cat([samples.weights.flatten() for samples in epoch])
        assert torch.equal(weights == 0, lasts[states])
    assert not torch.equal(seen[0].observations, seen[minibatches].observations) or minibatches == 60


def test_minibatches_of_a_recurrent_network_are_whole_unrolls(monkeypatch):
    monkeypatch.setitem(
        test_staged_update.AGENTS, "parts", (PPO, {**test_staged_update.UNROLLS, "minibatches": 3}, {"lstm": 5})
    )
    agent = test_staged_update.make_agent("parts")
    batch, seen, loss = test_staged_update.make_batch(agent, 0), [], PPO._loss
    monkeypatch.setattr(PPO, "_loss", lambda self, samples, part: (seen.append(samples), loss(self, samples, part))[1])
    agent.learn(batch)
    assert len(seen) == 12
    unrolls = torch.cat([samples.observations for samples in seen[:3]], 1)  # [T, N, ...]
    states = torch.cat([samples.states[0][0] for samples in seen[:3]])
    order = [(batch.window.states[0] == state).all(1).nonzero().item() for state in states]
    assert sorted(order) == list(range(test_staged_update.STREAMS))
    assert torch.equal(unrolls, batch.window.observations[:-1, order])


def test_a_recurrent_rollout_bootstraps_from_its_last_observation(monkeypatch):
    settings = {**test_staged_update.UNROLLS, "gae_lambda": 0.0, "gamma": 0.9}
    monkeypatch.setitem(test_staged_update.AGENTS, "parts", (PPO, settings, {"lstm": 5}))
    agent = test_staged_update.make_agent("parts")
    window = test_staged_update.make_batch(agent, 0).window
    state = window.states
    with torch.no_grad():
        targets = agent.samples(window, on_policy=True)[0].targets[-1]
        for observation, first in zip(window.observations, window.firsts):
            state = tuple(part.masked_fill(first[:, None], 0.0) for part in state)
            output, state = agent.model(observation, state)
    expected = window.rewards[-2] + 0.9 * window.discounts[-2] * output.value
    took_action = ~window.lasts[-2]
    torch.testing.assert_close(targets[took_action], expected[took_action])


def test_a_recurrent_loss_starts_from_the_stored_states(monkeypatch):
    """Where the behaviour policy is the network's own, its divergence is 0 in the first minibatch."""
    settings = {**test_staged_update.UNROLLS, "epochs": 1, "minibatches": 1}
    monkeypatch.setitem(test_staged_update.AGENTS, "parts", (PPO, settings, {"lstm": 5}))
    agent = test_staged_update.make_agent("parts")
    batch = test_staged_update.make_batch(agent, 0)
    with torch.no_grad():
        for part in agent.model.parameters():  # the policy begins as almost uniform, which would hide mistakes
            part.normal_(0.0, 0.4)
        batch.window.extras["logits"].copy_(agent.unroll(batch.window)[0].logits)
    assert float(agent.learn(batch).statistics["approximate_kl"]) == pytest.approx(0.0, abs=1e-6)


def test_a_recurrent_network_has_no_more_minibatches_than_unrolls(monkeypatch):
    settings = {**test_staged_update.UNROLLS, "epochs": 1, "minibatches": 8}
    monkeypatch.setitem(test_staged_update.AGENTS, "parts", (PPO, settings, {"lstm": 5}))
    agent = test_staged_update.make_agent("parts")
    agent.learn(test_staged_update.make_batch(agent, 0))
    assert agent._epochs.optimizer.state_dict()["updates"] == test_staged_update.STREAMS


@pytest.mark.parametrize(("kl", "goes_on"), [(0.099, True), (0.101, False)])
def test_epochs_go_on_up_to_the_target_kl(kl, goes_on):
    agent = table_agent(PPO, np.zeros((2, 1, A)), np.zeros((2, 1)), batch_size=1, target_kl=0.1)
    assert bool(agent._is_near({"approximate_kl": torch.tensor(kl)})) is goes_on


def test_an_asynchronous_rollout_with_an_infinite_reward_is_skipped():
    """V-trace bounds its targets, so the advantages alone show the reward."""
    batch, logits, values = random_unrolls(3, length=6, streams=10)
    batch.window.rewards[0, int((~batch.window.lasts[0]).nonzero()[0])] = torch.inf
    agent = table_agent(PPO, logits, values, batch_size=10)
    before = [part.clone() for part in agent.model.parameters()]
    assert agent.learn(batch).skipped
    assert all(torch.equal(*pair) for pair in zip(before, agent.model.parameters()))


# rewards and observations -----------------------------------------------------------------------------------------
CONTROL = EnvSpec(
    "control", ArraySpec((3,), "float32"), 0, Continuous(np.array([-2, 0], np.float32), np.array([2, 5], np.float32))
)


def control_agent(network=None, **settings):
    params = PPO.Params(unroll_length=4, batch_size=2, **settings)
    return PPO(params, CONTROL, partial(MLPAC, MLPACParams(hidden=8, **(network or {})), CONTROL))


def timestep(rewards, firsts):
    count = len(rewards)
    reward, first = np.array(rewards, np.float32), np.array(firsts)
    observation, discount = np.ones((count, 3), np.float32), np.ones(count, np.float32)
    return TimeStep(observation, reward, discount, first, ~first & False, 100 * reward)


def test_discounted_returns_are_carried_and_restart_with_an_episode():
    agent = control_agent(normalize_rewards=True, gamma=0.9)
    state = agent.initial_state(2)
    state = agent.act(timestep([0, 0], [True, True]), state, None).state
    state = agent.act(timestep([1, 2], [False, False]), state, None).state
    output = agent.act(timestep([3, -1], [False, False]), state, None)
    assert output.extras["discounted_return"].tolist() == pytest.approx([0.9 * 1 + 3, 0.9 * 2 - 1])
    assert "discounted_return" in agent.extras and "discounted_return" not in control_agent().extras


def test_rewards_are_divided_by_the_deviation_of_returns():
    batch = random_unrolls(1, length=4, streams=2)[0]
    agent = control_agent(normalize_rewards=True)
    agent.init_learner()
    window = batch.window
    generator = np.random.default_rng(0)
    returns = torch.from_numpy(generator.normal(3, 2, size=window.rewards.shape).astype(np.float32))
    rewards = torch.full(window.rewards.shape, 7.0)
    rewards[0, 0] = 1e9
    window = window._replace(rewards=rewards, extras={"discounted_return": returns})
    found = agent._rewards(window)
    assert found[0, 0] == MAX_REWARD
    assert float(found[1, 1]) == pytest.approx(7 / float(returns[:-1].std(correction=0)), rel=1e-5)


def test_a_resumed_run_may_begin_to_normalise_rewards():
    before, after = (control_agent(normalize_rewards=normalizes) for normalizes in (False, True))
    for agent in before, after:
        agent.init_learner()
    after.load_state_dict(before.state_dict())
    assert after.state_dict()["returns"]["count"] == 0


@pytest.mark.parametrize("scale", [1.0, 1_000.0])
def test_rare_rewards_are_divided_by_the_deviation_of_all_returns(scale):
    generator, agent = np.random.default_rng(0), control_agent(normalize_rewards=True)
    agent.init_learner()
    window, counted = random_unrolls(1, length=50, streams=20)[0].window, []
    for _ in range(30):
        rare = generator.random((51, 20)) < 0.01
        returns = (scale * rare * generator.uniform(0.1, 1, (51, 20))).astype(np.float32)
        counted.append(returns[:-1])
        window = window._replace(
            rewards=torch.full((51, 20), 0.1 * scale), extras={"discounted_return": torch.from_numpy(returns)}
        )
        found = agent._rewards(window)
    assert float(found[0, 0]) == pytest.approx(0.1 * scale / np.std(counted, dtype=np.float64), rel=1e-3)


def test_continuous_actions_are_stretched_clipped_and_stored_as_drawn():
    agent = control_agent()
    with torch.no_grad():
        agent.model.policy.bias.copy_(torch.tensor([0.5, 3.0]))
        agent.model.log_deviations.copy_(torch.tensor([-20.0, -20.0]))
    output = agent.act(timestep([0], [True]), (), agent.exploration(0, 1, 1, np.random.default_rng(0)))
    drawn = output.extras["drawn_action"][0]
    assert drawn[1] > 1 and output.extras["logits"].shape == (1, 4)
    assert output.action[0].tolist() == pytest.approx([2 * drawn[0], 5.0])
    squashed = PPO(agent.params.__class__(squash_actions=True), CONTROL, lambda: agent.model)
    output = squashed.act(timestep([0], [True]), (), None)
    assert output.action[0, 1] == pytest.approx(2.5 + 2.5 * np.tanh(output.extras["drawn_action"][0, 1]))
    greedy = squashed.greedy(agent.model(torch.ones(1, 3), ())[0])["action"].detach().numpy()
    np.testing.assert_allclose(greedy, output.action, rtol=1e-6)


def test_drawn_actions_have_the_policys_moments():
    agent = control_agent()
    with torch.no_grad():
        agent.model.policy.bias.copy_(torch.tensor([0.5, -1.0]))
        agent.model.log_deviations.copy_(torch.tensor([log(0.3), log(2.0)]))
    many = 20_000
    output = agent.act(timestep([0] * many, [True] * many), (), agent.exploration(0, 1, 1, np.random.default_rng(0)))
    drawn, means = output.extras["drawn_action"], output.extras["logits"][0, :2]
    np.testing.assert_allclose(drawn.mean(0), means, atol=5 * 2 / many**0.5)
    np.testing.assert_allclose(drawn.std(0), [0.3, 2.0], rtol=0.03)
    assert exp(output.extras["logits"][0, 3]) == pytest.approx(2.0)


# synchronous collection -------------------------------------------------------------------------------------------
INLINE = (
    *("--config", "ppo-cartpole", "--engine", "inline", "--machine", "test", "--num_actors", "2"),
    *("--num_envs_per_actor", "2", "--agent.unroll_length", "8", "--agent.epochs", "3", "--agent.minibatches", "2"),
    *("--agent.learning_rate", "1e-2", "--evaluator.period", "1e9", "--evaluator.episodes", "1"),
)


def test_synchronous_rollouts_are_whole_and_by_the_newest_policy(tmp_path, monkeypatch):
    rollouts, moved, uses, learn, loss = [], [], Counter(), PPO.learn, PPO._loss

    def checked_learn(self, batch):
        window = batch.window
        logits = self.unroll(window)[0].logits[:-1].detach()
        torch.testing.assert_close(window.extras["logits"][:-1], logits, rtol=1e-5, atol=1e-6)
        assert batch.on_policy and batch.keys.env_ids.tolist() == [0, 1, 2, 3]
        rollouts.append(batch.keys.step_ids.tolist())
        output = learn(self, batch)
        moved.append(float((self.unroll(window)[0].logits[:-1].detach() - logits).abs().max()))
        return output

    def counted_loss(self, samples, part):
        uses[len(rollouts)] += samples.observations.shape[1]
        return loss(self, samples, part)

    monkeypatch.setattr(PPO, "learn", checked_learn)
    monkeypatch.setattr(PPO, "_loss", counted_loss)
    train(tmp_path, *INLINE, "--updates", "6")
    assert rollouts == [[8 * number] * 4 for number in range(6)]
    assert min(moved) > 1e-3  # so that another version would have been noticed
    assert uses == dict.fromkeys(range(1, 7), 3 * 32)


def test_asynchronous_actors_do_not_wait(tmp_path, monkeypatch):
    on_policy, learn = [], PPO.learn
    monkeypatch.setattr(PPO, "learn", lambda self, batch: (on_policy.append(batch.on_policy), learn(self, batch))[1])
    words = ("--memory_type", "queue", "--memory.capacity", "12", "--agent.batch_size", "6")
    context = train(tmp_path, *INLINE, *words, "--updates", "4")
    assert on_policy == [False] * 4 and context.counters.updates == 4
