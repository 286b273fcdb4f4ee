"""Masked policies are those over legal actions alone, and exploration follows the papers' formulas."""

import numpy as np
import pytest
import torch

from core.ops.actions import epsilon_greedy, ladder, linear, mask_actions, ornstein_uhlenbeck, random_legal_actions
from core.ops.policy_distributions import Categorical, ChoicesAndNumbers, MultiCategorical
from core.ops.returns import munchausen_bonus, soft_bootstrap

T, B, NVEC, NUMBERS = 3, 4, (3, 4), 2
POLICIES = {  # policy, choices, numbers
    "one choice": (Categorical(), (7,), 0),
    "two choices": (MultiCategorical(NVEC), NVEC, 0),
    "two choices and two numbers": (ChoicesAndNumbers(NVEC, squashed=False), NVEC, NUMBERS),
}


def case(name, seed):
    """Return a policy, two sets of parameters, masks [T, B, A] and legal actions."""
    (policy, choices, numbers), generator = POLICIES[name], np.random.default_rng(seed)
    size = sum(choices) + 2 * numbers
    logits, others = (torch.from_numpy(generator.normal(size=(T, B, size))) for _ in range(2))
    legal = generator.random((T, B, sum(choices))) < 0.5
    legal[..., np.cumsum((0, *choices[:-1]))] = True
    actions = random_legal_actions(legal.reshape(T * B, -1), choices, generator).reshape(T, B, -1)
    if numbers:
        actions = np.concatenate([actions, generator.normal(size=(T, B, numbers))], -1)
    taken = torch.from_numpy(actions if len(choices) > 1 else actions[..., 0])
    return policy, choices, logits, others, torch.from_numpy(legal), taken


def parts(choices, *tensors):
    return zip(*(tensor[..., : sum(choices)].split(choices, -1) for tensor in tensors))


def normals(choices, parameters):
    """Return the distributions of the numbers behind the choices; empty ones if there are none."""
    means, log_deviations = parameters[..., sum(choices) :].chunk(2, -1)
    return torch.distributions.Normal(means, log_deviations.exp())


@pytest.mark.parametrize("name", POLICIES)
def test_masked_policies_equal_those_over_legal_actions_alone(name):
    policy, choices, logits, others, legal, taken = case(name, 1)
    p, q = mask_actions(logits, legal), mask_actions(others, legal)
    found = torch.stack([policy.log_probs(p, taken), policy.entropies(p), policy.kl(p, q)])
    expected = torch.zeros_like(found)
    for t, b in np.ndindex(T, B):
        for number, (x, y, m) in enumerate(parts(choices, logits[t, b], others[t, b], legal[t, b])):
            log_p, log_q = x[m].log_softmax(0), y[m].log_softmax(0)
            action = int(taken[t, b] if taken.ndim == 2 else taken[t, b, number])
            expected[0, t, b] += log_p[int(m[:action].sum())]
            expected[1, t, b] -= (log_p.exp() * log_p).sum()
            expected[2, t, b] += (log_p.exp() * (log_p - log_q)).sum()
    if POLICIES[name][2]:
        normal, other = normals(choices, logits), normals(choices, others)
        expected[0] += normal.log_prob(taken[..., len(choices) :]).sum(-1)
        expected[1] += normal.entropy().sum(-1)
        expected[2] += torch.distributions.kl_divergence(normal, other).sum(-1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("function", ["log_probs", "entropies", "kl"])
def test_gradients_of_masked_policies_equal_finite_differences(name, function):
    policy, _, logits, others, legal, taken = case(name, 2)

    def of(logits):
        masked = mask_actions(logits, legal)
        arguments = {"log_probs": (taken,), "entropies": (), "kl": (mask_actions(others, legal),)}[function]
        return getattr(policy, function)(masked, *arguments)

    assert torch.autograd.gradcheck(of, logits.clone().requires_grad_())
    of(leaf := logits.clone().requires_grad_()).sum().backward()
    of_choices = leaf.grad[..., : legal.shape[-1]]
    assert (of_choices[~legal] == 0).all() and (of_choices[legal] != 0).any()
    assert (leaf.grad[..., legal.shape[-1] :] != 0).any() or not POLICIES[name][2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", POLICIES)
def test_masked_policies_never_draw_illegal_actions(name, dtype):
    policy, choices, parameters, _, legal, _ = case(name, 3)
    legal, behind = legal.numpy().reshape(T * B, -1), parameters.numpy().reshape(T * B, -1)[:, sum(choices) :]
    generator = np.random.default_rng(4)
    # illegal logits far above the legal ones
    scores = np.concatenate([np.where(legal, -50.0, 50.0), behind], 1).astype(dtype)
    logits = mask_actions(torch.from_numpy(scores), torch.from_numpy(legal)).numpy()
    assert logits.dtype == dtype and (logits[:, sum(choices) :] == scores[:, sum(choices) :]).all()
    likeliest = policy.likeliest(torch.from_numpy(logits)).numpy()
    for drawn in (likeliest, *(policy.sample(logits, generator) for _ in range(50))):
        actions = drawn.reshape(T * B, -1)[:, : len(choices)].astype(np.int64)
        assert np.take_along_axis(legal, actions + np.cumsum((0, *choices[:-1])), 1).all()


def test_without_a_mask_scores_stay_themselves():
    logits = torch.zeros(2, 3)
    assert mask_actions(logits, None) is logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_illegal_action_is_worse_than_any_value(dtype):
    largest = torch.finfo(dtype).max
    scores = torch.tensor([[0.0, -0.9 * largest, largest]], dtype=dtype)
    assert mask_actions(scores, torch.tensor([[False, True, False]])).argmax(1).tolist() == [1]


def test_random_legal_actions_are_uniform_and_epsilon_greedy_takes_them():
    legal = np.array([[1, 0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 1]], bool).repeat(6_000, 0)
    drawn = random_legal_actions(legal, NVEC, np.random.default_rng(1))
    for row, shares in ((0, [(0.5, 0, 0.5), (0.5, 0.5, 0, 0)]), (1, [(0, 1, 0), (0, 1 / 3, 1 / 3, 1 / 3)])):
        for choice, expected in enumerate(shares):
            counts = np.bincount(drawn[row * 6_000 :][:6_000, choice], minlength=len(expected))
            np.testing.assert_allclose(counts / 6_000, expected, atol=0.03)
    epsilon, first = np.full(12_000, 0.4), legal[:, :3]
    explored = epsilon_greedy(np.full(12_000, 1), 3, epsilon, np.random.default_rng(2), first)
    assert set(explored[6_000:]) == {1} and set(explored[:6_000]) == {0, 1, 2}
    assert (explored[:6_000] != 1).mean() == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("temperature", [0.03, 1.0])
def test_munchausens_sums_are_over_legal_actions_alone(temperature):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(6, 5, generator=generator)  # float32, which / 0.03 leaves for illegal actions
    outputs = torch.randn(6, 5, 4, generator=generator)
    legal = torch.rand(6, 5, generator=generator) < 0.6
    legal[:, 2] = True
    actions = torch.full((6,), 2)
    masked = mask_actions(values, legal)
    found = soft_bootstrap(masked, outputs, temperature)
    bonus = munchausen_bonus(masked, actions, 0.9, temperature, -1.0)
    for b in range(6):
        some = values[b, legal[b]]
        pi = (some / temperature).softmax(0)
        log = temperature * (some / temperature).log_softmax(0)
        torch.testing.assert_close(found[b], (pi[:, None] * (outputs[b, legal[b]] - log[:, None])).sum(0))
        own = log[int(legal[b, :2].sum())]
        torch.testing.assert_close(bonus[b], 0.9 * own.clamp(-1, 0))


def test_linear_decay_reaches_its_end_and_stays():
    assert [linear(step, 1.0, 0.1, 10) for step in (0, 5, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_the_ladder_is_that_of_ape_x():
    assert ladder(8, 0.4, 7.0) == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert ladder(1, 0.4, 7.0) == pytest.approx([0.4])


def test_epsilon_greedy_uses_each_environments_epsilon():
    generator = np.random.default_rng(0)
    epsilon = np.array([0.0, 0.5, 1.0])
    actions = np.array([epsilon_greedy(np.full(3, 2), 4, epsilon, generator) for _ in range(20_000)])
    departed = (actions != 2).mean(0)
    assert departed == pytest.approx(epsilon * 3 / 4, abs=0.02)


def test_environments_explore_independently():
    actions = epsilon_greedy(np.zeros(20_000, np.int64), 4, np.ones(20_000), np.random.default_rng(1))
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 20_000, 0.25, atol=0.02)


def test_an_ornstein_uhlenbeck_step_follows_its_equation():
    state, sigma, normal = np.array([[1.0, -2.0]]), np.array([[0.3]]), np.array([[0.5, 0.0]])
    after = ornstein_uhlenbeck(state, 0.15, sigma, 0.04, normal)
    assert after[0].tolist() == pytest.approx([1 - 0.15 * 0.04 + 0.3 * 0.2 * 0.5, -2 + 2 * 0.15 * 0.04])
    assert state.tolist() == [[1.0, -2.0]]
