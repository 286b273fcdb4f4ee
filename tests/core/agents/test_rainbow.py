"""Rainbow's targets, losses and priorities equal loops in float64; noise, options and checkpoints work."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from core.agents.dqn import DQN, DQNParams
from core.agents.rainbow import Rainbow, RainbowParams
from core.model import Model
from core.models.dqn import DQNMLP, RainbowMLP
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import Batch, SampleIds, TimeStep, Window
from tests.core.distributions import algorithm_1, quantile_sum, softmax
from utils.config.rows import from_row
from utils.options import CONFIGS

STATES, ACTIONS, ATOMS, GAMMA = 20, 3, 7, 0.9
SPEC = EnvSpec("numbers", ArraySpec((1,), "float32"), 0, Discrete(ACTIONS))


class Table(Model):
    """Hold one distribution for each of the states 0 .. 19 and each action."""

    output_kind = "distribution"
    observations = "vector"

    def __init__(self):
        super().__init__(None, SPEC)
        self.numbers = nn.Parameter(torch.randn(STATES, ACTIONS, ATOMS))

    def forward(self, observation, state=()):
        return self.numbers[observation[:, 0].long()], state


def learner(agent):
    agent.init_learner()
    return agent


def make_agent(**settings):
    params = RainbowParams(optimizer="adam", learning_rate=0.1, clip_norm=0.0, gamma=GAMMA, v_min=-2.0, v_max=4.0)
    return learner(Rainbow(replace(params, **settings), SPEC, Table))


def make_noisy(noise_per_env=True, **settings):
    params = replace(RainbowParams(n_step=2, learning_rate=1e-2), **settings)
    return learner(
        Rainbow(params, SPEC, lambda: RainbowMLP(RainbowMLP.Params(hidden=16, noise_per_env=noise_per_env), SPEC))
    )


def make_batch(states, finals, actions, rewards, discounts, lasts, weights=None):
    """Return a batch of per-sample lists; `rewards`, `discounts` and `lasts` are [B][n + 1]."""
    size, rows = np.shape(rewards)
    window = Window(
        torch.tensor(np.array([states, finals]), dtype=torch.float32)[..., None],
        torch.zeros(rows, size, dtype=torch.bool),
        torch.tensor(lasts).T,
        torch.tensor(actions)[None].expand(rows, -1),
        torch.tensor(rewards, dtype=torch.float32).T,
        torch.tensor(discounts, dtype=torch.float32).T,
        {},
    )
    weights = torch.ones(size) if weights is None else torch.tensor(weights, dtype=torch.float32)
    return Batch(window, SampleIds(np.zeros(size, np.int64), np.arange(size)), weights)


def random_batch(n_step, size=40, seed=0):
    """Return windows of which many contain an episode's end; the step before it has discount 0 or, if truncated, 1."""
    generator = np.random.default_rng(seed)
    lasts = np.zeros((size, n_step + 1), bool)
    ends = generator.integers(1, 2 * n_step + 1, size)
    discounts = np.ones((size, n_step + 1))
    for sample, end in enumerate(ends):
        if end <= n_step:
            lasts[sample, end] = True
            discounts[sample, end - 1] = generator.integers(2)
    return make_batch(
        generator.integers(STATES, size=size),
        generator.integers(STATES, size=size),
        generator.integers(ACTIONS, size=size),
        generator.normal(size=(size, n_step + 1)),
        discounts,
        lasts,
        generator.uniform(0.1, 1, size),
    )


def table(model):
    return model.numbers.detach().double().numpy()


class Twin:
    """Compute one update of Rainbow, one sample at a time in float64."""

    def __init__(self, agent, batch):
        params, window = agent.params, batch.window
        self.online, self.target = table(agent.model), table(agent.target)
        self.quantile = params.distribution == "quantile"
        self.support = np.linspace(params.v_min, params.v_max, ATOMS)
        self.losses, self.gradient = [], np.zeros_like(self.online)
        size = len(batch.weights)
        for sample in range(size):
            reward, factor = 0.0, 1.0
            for row in range(params.n_step):
                if window.lasts[row, sample]:
                    break
                reward += factor * float(window.rewards[row, sample])
                factor *= params.gamma * float(window.discounts[row, sample])
            state, final = (int(number) for number in window.observations[:, sample, 0])
            action, chooser = int(window.actions[0, sample]), self.online if params.double_q else self.target
            best = max(range(ACTIONS), key=lambda a: self.mean(chooser[final, a]))
            taken, bootstrap = self.online[state, action], self.target[final, best]
            if self.quantile:
                self.losses.append(quantile_sum(taken[None], (reward + factor * bootstrap)[None], params.kappa)[0])
                continue
            probabilities = algorithm_1(softmax(bootstrap)[None], [reward], [factor], params.v_min, params.v_max)[0]
            held = probabilities > 0
            self.losses.append(
                (probabilities[held] * (np.log(probabilities[held]) - np.log(softmax(taken)[held]))).sum()
            )
            self.gradient[state, action] += float(batch.weights[sample]) / size * (softmax(taken) - probabilities)

    def mean(self, numbers):
        return numbers.mean() if self.quantile else softmax(numbers) @ self.support


def spread(agent, seed=0):
    """Set the online and target networks apart."""
    torch.manual_seed(seed)
    for model in (agent.target, agent.model):
        model.numbers.data = 2 * torch.randn(STATES, ACTIONS, ATOMS)
    return agent


@pytest.mark.parametrize("distribution", ["categorical", "quantile"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_losses_and_priorities_equal_the_loop(distribution, double, n_step):
    agent, batch = (
        spread(make_agent(distribution=distribution, double_q=double, n_step=n_step, kappa=0.7)),
        random_batch(n_step),
    )
    window, twin = batch.window, Twin(agent, batch)
    cut = window.lasts.any(0) & ((window.discounts == 0) & ~window.lasts).any(0)
    assert cut.any() and (window.lasts.any(0) & ~cut).any() and not window.lasts.any(0).all(), (
        "terminated, truncated and whole windows"
    )
    output = agent.learn(batch)
    np.testing.assert_allclose(output.priorities.numpy(), twin.losses, rtol=1e-3, atol=1e-5)
    assert float(output.statistics["loss"]) == pytest.approx(
        float((batch.weights.numpy() * twin.losses).mean()), rel=1e-4
    )


def test_the_gradient_is_softmax_minus_target_at_taken_actions():
    agent, batch = spread(make_agent()), random_batch(3)
    twin = Twin(agent, batch)
    agent.learn(batch)
    np.testing.assert_allclose(agent.model.numbers.grad.numpy(), twin.gradient, atol=1e-5)
    assert agent.target.numbers.grad is None


def test_only_the_prediction_requires_gradients():
    agent, kept = make_agent(), []
    for model in (agent.target, agent.model):
        model.register_forward_hook(
            lambda model, inputs, output: kept.append((model is agent.model, output[0].requires_grad))
        )
    agent.learn(random_batch(3))
    assert sorted(kept) == [(False, False), (True, False), (True, True)]


def test_a_perfect_prediction_has_a_valid_priority():
    agent = make_agent(n_step=1, double_q=False, gamma=1.0)
    agent.model.numbers.data[:, 1:] = agent.model.numbers.data[:, :1]  # one distribution per state, for any action
    agent.target.load_state_dict(agent.model.state_dict())
    states = list(range(STATES)) * 10
    batch = make_batch(states, states, [0] * 200, [[0.0, 0.0]] * 200, [[1.0, 1.0]] * 200, [[False, False]] * 200)
    priorities = agent.learn(batch).priorities
    assert (priorities >= 0).all() and priorities.max() < 1e-5


def test_new_steps_get_the_largest_priority_and_store_no_extras():
    agent = make_agent()
    assert agent.initial_priorities(random_batch(3).window) is None and agent.extras == {}
    assert agent.window.observations == (0, 3) and agent.window.length == 3 and not agent.window.stride


def test_the_defaults_are_the_papers():
    params = RainbowParams()
    assert (
        params.distribution,
        params.v_min,
        params.v_max,
        params.n_step,
        params.batch_size,
        params.learning_rate,
        params.optimizer_eps,
        params.optimizer,
        params.target_update_period,
        params.exploration_epsilon_start,
        params.exploration_epsilon_end,
        params.double_q,
        params.gamma,
    ) == ("categorical", -10, 10, 3, 32, 6.25e-5, 1.5e-4, "adam", 2000, 0, 0, True, 0.99)


@pytest.mark.parametrize("v_max", [-2.0, -3.0])
def test_a_support_without_extent_is_refused(v_max):
    assert Rainbow.problems(RainbowParams(v_min=-2.0, v_max=v_max)) == [
        f"agent.v_min=-2.0 must be below agent.v_max={v_max}"
    ]
    assert (
        Rainbow.problems(RainbowParams(v_min=-2.0, v_max=v_max, distribution="quantile"))
        == Rainbow.problems(RainbowParams())
        == []
    )


# acting -----------------------------------------------------------------------------------------------------------
def step(*states):
    return TimeStep(np.array([[state] for state in states], np.float32), *[np.zeros(len(states))] * 5)


@pytest.mark.parametrize("distribution", ["categorical", "quantile"])
def test_greedy_acting_takes_the_action_of_the_largest_mean(distribution):
    agent = spread(make_agent(distribution=distribution))
    support, numbers = np.linspace(-2, 4, ATOMS), table(agent.model)
    means = numbers.mean(-1) if distribution == "quantile" else softmax(numbers) @ support  # [S, A]
    output = agent.act(step(*range(STATES)), (), None)
    assert output.action.tolist() == means.argmax(1).tolist()
    np.testing.assert_allclose(output.extras["q_max"], means.max(1), rtol=1e-5)


def test_acting_is_noisy_in_training_and_not_in_evaluation():
    agent = make_noisy()
    exploration = agent.exploration(0, 1, 2, np.random.default_rng(0))
    exploration.update(0, 0)
    assert exploration.epsilon.tolist() == [0, 0] and agent.evaluation_exploration(2, np.random.default_rng(0)) is None
    noisy = [agent.act(step(1.0, 2.0), (), exploration).extras["q_max"].tolist() for _ in range(3)]
    exact = [agent.act(step(1.0, 2.0), (), None).extras["q_max"].tolist() for _ in range(3)]
    assert len({*map(tuple, noisy)}) == 3 and len({*map(tuple, exact)}) == 1


@pytest.mark.parametrize("noise_per_env", [True, False])
def test_environments_that_act_have_noise_of_their_own(noise_per_env):
    agent = make_noisy(noise_per_env)
    values = agent.act(step(1.0, 1.0, 1.0), (), agent.exploration(0, 1, 3, np.random.default_rng(0))).extras["q_max"]
    assert np.ptp(values) > 1e-4 if noise_per_env else np.ptp(values) < 1e-6
    agent.learn(make_batch([1.0], [2.0], [0], [[1.0, 0.0, 0.0]], [[1.0] * 3], [[False] * 3]))
    learnt = agent.model(torch.ones(3, 1), ())[0]  # a batch of the learner shares one draw
    assert torch.allclose(learnt, learnt[:1].expand_as(learnt))


def test_an_evaluation_with_epsilon_has_no_parameter_noise():
    agent = make_noisy(evaluation_epsilon=0.5)
    exploration = agent.evaluation_exploration(1, np.random.default_rng(0))
    assert exploration.epsilon.tolist() == [0.5]
    assert len({float(agent.act(step(1.0), (), exploration).extras["q_max"][0]) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "agent",
    [make_noisy(), learner(DQN(DQNParams(n_step=2), SPEC, lambda: DQNMLP(DQNMLP.Params(noisy=True, hidden=16), SPEC)))],
)
def test_each_forward_pass_of_an_update_draws_its_own_noise(agent, monkeypatch):
    drawn, randn = [], torch.randn
    layers = sum(hasattr(layer, "weight_sigma") for layer in agent.target.modules())
    agent.act(step(1.0), (), None)
    monkeypatch.setattr(torch, "randn", lambda *sizes, **kinds: (drawn.append(randn(*sizes, **kinds)), drawn[-1])[1])
    agent.learn(random_batch(2))
    assert len(drawn) == 3 * layers and len({float(noise[0]) for noise in drawn}) == 3 * layers


def test_learning_moves_means_and_sigmas():
    agent = make_noisy()
    agent.learn(random_batch(2))
    before = {name: tensor.clone() for name, tensor in agent.model.state_dict().items()}
    agent.learn(random_batch(2))
    unmoved = [name for name, tensor in agent.model.state_dict().items() if torch.equal(tensor, before[name])]
    assert unmoved == [] and any(name.endswith("bias_sigma") for name in before)


def test_an_update_of_the_whole_network_equals_float64(monkeypatch):
    """Each pass has its own noise, the head is dueling, and Adam takes the step of the clipped gradient."""
    torch.manual_seed(0)
    agent, batch, drawn, randn = make_noisy(clip_norm=0.01), random_batch(2), [], torch.randn
    settings, atoms = agent.params, agent.model.params.atoms
    with torch.no_grad():
        for tensor in agent.target.parameters():
            tensor += 0.1 * randn(tensor.shape)
    online, target = (
        {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
        for model in (agent.model, agent.target)
    )
    monkeypatch.setattr(torch, "randn", lambda *sizes, **kinds: (drawn.append(randn(*sizes, **kinds)), drawn[-1])[1])
    output = agent.learn(batch)
    passes = [[torch.sign(noise) * noise.double().abs().sqrt() for noise in drawn[k : k + 4]] for k in (0, 4, 8)]

    def logits(weights, states, factors):
        def noisy(name, inputs, both):
            first, second = both.split([inputs.shape[1], len(both) - inputs.shape[1]])
            weight = weights[f"q.{name}.weight"] + weights[f"q.{name}.weight_sigma"] * second[:, None] * first
            return inputs @ weight.T + weights[f"q.{name}.bias"] + weights[f"q.{name}.bias_sigma"] * second

        features = (states @ weights["torso.1.weight"].T + weights["torso.1.bias"]).relu()
        # The value is the same, and the gradient is divided by the root of 2.
        features = features * 0.5**0.5 + features.detach() * (1 - 0.5**0.5)
        streams = (("advantage", factors[:2]), ("value", factors[2:]))
        advantage, value = (
            noisy(f"{name}.2", noisy(f"{name}.0", features, pair[0]).relu(), pair[1]).unflatten(1, (-1, atoms))
            for name, pair in streams
        )
        return value + advantage - advantage.mean(1, keepdim=True)

    window = batch.window
    states, finals = window.observations.double()
    rows = torch.arange(len(states))
    support = torch.linspace(settings.v_min, settings.v_max, atoms, dtype=torch.float64)
    best = (logits(online, finals, passes[1]).softmax(2) @ support).argmax(1)
    bootstrap = logits(target, finals, passes[0])[rows, best].softmax(1)
    rewards, factors = np.zeros(len(states)), np.ones(len(states))
    for sample in range(len(states)):
        for step_ind in range(settings.n_step):
            if window.lasts[step_ind, sample]:
                break
            rewards[sample] += factors[sample] * float(window.rewards[step_ind, sample])
            factors[sample] *= settings.gamma * float(window.discounts[step_ind, sample])
    moved = torch.from_numpy(algorithm_1(bootstrap.numpy(), rewards, factors, settings.v_min, settings.v_max))
    for tensor in online.values():
        tensor.requires_grad_()
    taken = logits(online, states, passes[2])[rows, window.actions[0]].log_softmax(1)
    losses = (torch.xlogy(moved, moved) - moved * taken).sum(1)
    (losses * batch.weights.double()).mean().backward()
    norm = torch.stack([tensor.grad.norm() for tensor in online.values()]).norm()
    np.testing.assert_allclose(output.priorities.numpy(), losses.detach().numpy(), rtol=1e-3, atol=1e-5)
    assert float(output.statistics["grad_norm"]) == pytest.approx(float(norm), rel=1e-4) and norm > settings.clip_norm
    for name, tensor in agent.model.named_parameters():
        gradient = online[name].grad * settings.clip_norm / norm  # Adam's first step: both moments are unbiased
        moment = gradient / (gradient.abs() + settings.optimizer_eps)
        expected = online[name].detach() - settings.learning_rate * moment
        np.testing.assert_allclose(tensor.detach().numpy(), expected.numpy(), atol=1e-6, err_msg=name)


# configs ----------------------------------------------------------------------------------------------------------
ROW = "rainbow-minatar-breakout"
MEMORY = {
    "memory_type": "shared",
    "memory.alpha": None,
    "memory.beta_start": None,
    "memory.beta_end": None,
    "memory.beta_updates": None,
    "memory.priority_epsilon": None,
}
PLAIN_Q = {
    "agent_type": "dqn",
    "model_type": "dqn-minatar",
    "agent.distribution": None,
    "agent.v_min": None,
    "agent.v_max": None,
    "agent.kappa": None,
    "agent.loss": "huber",
    "model.atoms": None,
}
PARTS = {  # the options in which each ablation differs from Rainbow
    "no-double": {"agent.double_q": False},
    "no-dueling": {"model.dueling": False},
    "no-nstep": {"agent.n_step": 1},
    "no-prioritized": MEMORY,
    "no-noisy": {
        "model.noisy": False,
        "agent.exploration_epsilon_start": 1.0,
        "agent.exploration_epsilon_end": 0.01,
        "agent.exploration_epsilon_steps": 100_000,
    },
    "no-distributional": PLAIN_Q,
    "quantile": {"agent.distribution": "quantile"},
}


def settings(name):
    options, problems = from_row(next(row for row in CONFIGS if row["name"] == name))
    assert not problems
    flat = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        flat |= (
            {f"{field.name}.{key}": item for key, item in dataclasses.asdict(value).items()}
            if dataclasses.is_dataclass(value)
            else {field.name: value}
        )
    return flat


@pytest.mark.parametrize("part", PARTS)
def test_an_ablation_differs_in_its_part_and_steps_only(part):
    whole, other = settings(ROW), settings(f"rainbow-{part}-minatar-breakout")
    differences = {name: other.get(name) for name in {**whole, **other} if whole.get(name) != other.get(name)}
    assert (differences.pop("config"), differences.pop("steps")) == (f"rainbow-{part}-minatar-breakout", 60_000)
    assert differences == PARTS[part]
