"""Log-probabilities, entropies and divergences of policies equal torch's, and brute force over samples."""

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from core.ops.policy_distributions import ChoicesAndNumbers, DiagonalGaussian, MultiCategorical, squashed_gaussian

T, B, A = 3, 4, 2


def gaussians(seed, squashed=False, largest=0.7):
    generator = np.random.default_rng(seed)
    means, logs = generator.normal(size=(T, B, A)), generator.uniform(-1.5, largest, size=(T, B, A))
    return DiagonalGaussian(squashed), means, np.exp(logs), torch.from_numpy(np.concatenate([means, logs], -1))


def normal(means, deviations):
    return Normal(torch.from_numpy(means), torch.from_numpy(deviations))


def test_gaussian_densities_and_entropies_are_torchs():
    policy, means, deviations, parameters = gaussians(0)
    actions, truth = torch.from_numpy(np.random.default_rng(1).normal(size=(T, B, A))), normal(means, deviations)
    np.testing.assert_allclose(policy.log_probs(parameters, actions), truth.log_prob(actions).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(policy.entropies(parameters), truth.entropy().sum(-1), rtol=1e-12)


def grid(means, deviations):
    """Return points u [N] that span almost all of each Gaussian, and their spacing."""
    reach = 9 * deviations.max()
    points = np.linspace(means.min() - reach, means.max() + reach, 40_001)
    return points, points[1] - points[0]


@pytest.mark.parametrize("squashed", [False, True])
def test_densities_and_entropies_of_one_number_integrate(squashed):
    """Integrate over the executed action: du is da / (1 - tanh(u)^2) if it is squashed."""
    policy, means, deviations, parameters = gaussians(2, squashed)
    for t, b in np.ndindex(T, B):
        one = parameters[t, b, ::A]  # mean and deviation of the first number
        points, spacing = grid(means[t, b, :1], deviations[t, b, :1])
        columns = one.expand(1, len(points), 2)
        log_densities = policy.log_probs(columns, torch.from_numpy(points)[None, :, None])[0].numpy()
        widths = spacing * ((1 - np.tanh(points) ** 2) if squashed else 1.0)
        finite = widths > 0
        mass = np.exp(log_densities[finite]) * widths[finite]
        assert mass.sum() == pytest.approx(1, abs=1e-5)
        entropy = float(policy.entropies(one[None, None]))
        assert entropy == pytest.approx(-(mass * log_densities[finite]).sum(), abs=2e-3)


def test_gaussian_kl_integrates_and_squashing_does_not_change_it():
    policy, means, deviations, p = gaussians(3)
    _, other_means, other_deviations, q = gaussians(4)
    found = policy.kl(p, q)
    assert torch.equal(found, DiagonalGaussian(True).kl(p, q)) and (policy.kl(p, p).abs() < 1e-12).all()
    for t, b in np.ndindex(T, B):
        expected = 0.0
        for i in range(A):
            points, spacing = grid(means[t, b, i : i + 1], deviations[t, b, i : i + 1])

            def log_density(mean, deviation, points=points):
                return -0.5 * ((points - mean) / deviation) ** 2 - np.log(deviation) - 0.5 * np.log(2 * np.pi)

            log_p = log_density(means[t, b, i], deviations[t, b, i])
            log_q = log_density(other_means[t, b, i], other_deviations[t, b, i])
            expected += (np.exp(log_p) * (log_p - log_q)).sum() * spacing
        assert float(found[t, b]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("squashed", [False, True])
def test_gradients_equal_finite_differences(squashed):
    policy, _, _, parameters = gaussians(5, squashed)
    actions = torch.from_numpy(np.random.default_rng(6).normal(size=(T, B, A)))
    other = gaussians(7)[3]
    for function in (lambda p: policy.log_probs(p, actions), policy.entropies, lambda p: policy.kl(other, p)):
        assert torch.autograd.gradcheck(function, parameters.clone().requires_grad_())


def test_gaussian_samples_are_those_of_the_generator():
    policy, means, deviations, parameters = gaussians(8)
    flat = parameters[0].numpy()
    noise = np.random.default_rng(9).standard_normal((B, A), np.float32)
    np.testing.assert_allclose(
        policy.sample(flat, np.random.default_rng(9)), means[0] + deviations[0] * noise, rtol=1e-12
    )
    assert (policy.likeliest(parameters[0]).numpy() == means[0]).all()


def test_parameters_that_do_not_fit_are_refused():
    policy = DiagonalGaussian(False)
    with pytest.raises(ValueError, match=r"must be \[T, B, 2 A\], not \(3, 4, 3\)"):
        policy.entropies(torch.zeros(T, B, 3))
    with pytest.raises(ValueError, match=r"actions \(3, 4, 1\) do not fit means \(3, 4, 2\)"):
        policy.log_probs(torch.zeros(T, B, 4), torch.zeros(T, B, 1))


NVEC = (2, 3, 1, 2)


def choices(seed):
    """Return logits of several choices, and the logarithms of all combinations' probabilities [T, B, combinations]."""
    logits = np.random.default_rng(seed).normal(size=(T, B, sum(NVEC)))
    combinations = list(np.ndindex(*NVEC))
    joint = np.zeros((T, B, len(combinations)))
    for t, b in np.ndindex(T, B):
        powers = [np.exp(part) for part in np.split(logits[t, b], np.cumsum(NVEC)[:-1])]
        for number, combination in enumerate(combinations):
            joint[t, b, number] = sum(np.log(p[i] / p.sum()) for p, i in zip(powers, combination))
    return torch.from_numpy(logits), joint, np.array(combinations)


def test_several_choices_equal_brute_force_over_all_combinations():
    policy = MultiCategorical(NVEC)
    (p, log_p, combinations), (q, log_q, _) = choices(1), choices(2)
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1)
    for number, combination in enumerate(combinations):
        actions = torch.from_numpy(combination).expand(T, B, -1)
        np.testing.assert_allclose(policy.log_probs(p, actions), log_p[..., number], rtol=1e-12)
    np.testing.assert_allclose(policy.entropies(p), -(np.exp(log_p) * log_p).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(policy.kl(p, q), (np.exp(log_p) * (log_p - log_q)).sum(-1), rtol=1e-12)


def test_gradients_of_several_choices_equal_finite_differences():
    policy, (p, _, combinations), (q, _, _) = MultiCategorical(NVEC), choices(3), choices(4)
    drawn = np.random.default_rng(5).integers(len(combinations), size=(T, B))
    actions = torch.from_numpy(combinations[drawn])
    for function in (lambda p: policy.log_probs(p, actions), policy.entropies, lambda p: policy.kl(q, p)):
        assert torch.autograd.gradcheck(function, p.clone().requires_grad_())


def test_samples_of_several_choices_have_their_joint_probabilities():
    policy, (p, log_p, combinations) = MultiCategorical(NVEC), choices(6)
    one = np.repeat(p[0, 0].numpy()[None], 20_000, 0)
    drawn = policy.sample(one, np.random.default_rng(7))
    shares = np.array([(drawn == combination).all(1).mean() for combination in combinations])
    np.testing.assert_allclose(shares, np.exp(log_p[0, 0]), atol=0.015)
    likeliest = combinations[log_p[0, 0].argmax()]
    assert (policy.likeliest(p[0, :1]).numpy() == likeliest).all()


def mixed(seed, squashed=False):
    """Return a policy of choices and numbers, its parameters, and those of its parts."""
    logits, log_joint, combinations = choices(seed)
    _, means, deviations, moments = gaussians(seed, squashed)
    policy = ChoicesAndNumbers(NVEC, squashed)
    return policy, torch.cat([logits, moments], -1), (log_joint, combinations), (means, deviations)


def test_choices_and_numbers_are_the_sums_of_torchs_and_brute_force():
    policy, p, (log_p, combinations), moments = mixed(11)
    _, q, (log_q, _), other_moments = mixed(12)
    numbers, truth = np.random.default_rng(13).normal(size=(T, B, A)), normal(*moments)
    densities = truth.log_prob(torch.from_numpy(numbers)).sum(-1).numpy()
    for number, combination in enumerate(combinations):
        actions = np.concatenate([np.broadcast_to(combination, (T, B, len(NVEC))), numbers], -1)
        found = policy.log_probs(p, torch.from_numpy(actions))
        np.testing.assert_allclose(found, log_p[..., number] + densities, rtol=1e-12)
    entropies = -(np.exp(log_p) * log_p).sum(-1) + truth.entropy().sum(-1).numpy()
    np.testing.assert_allclose(policy.entropies(p), entropies, rtol=1e-12)
    of_numbers = kl_divergence(truth, normal(*other_moments)).sum(-1).numpy()
    expected = (np.exp(log_p) * (log_p - log_q)).sum(-1) + of_numbers
    np.testing.assert_allclose(policy.kl(p, q), expected, rtol=1e-12)


@pytest.mark.parametrize("squashed", [False, True])
def test_gradients_of_choices_and_numbers_equal_finite_differences(squashed):
    policy, p, (_, combinations), _ = mixed(14, squashed)
    q, generator = mixed(15, squashed)[1], np.random.default_rng(16)
    drawn = combinations[generator.integers(len(combinations), size=(T, B))]
    actions = torch.from_numpy(np.concatenate([drawn, generator.normal(size=(T, B, A))], -1))
    for function in (lambda p: policy.log_probs(p, actions), policy.entropies, lambda p: policy.kl(q, p)):
        assert torch.autograd.gradcheck(function, p.clone().requires_grad_())


def test_samples_of_choices_and_numbers_have_their_probabilities_and_moments():
    policy, p, (log_p, combinations), (means, deviations) = mixed(17)
    one = np.repeat(p[0, 0].numpy()[None], 20_000, 0)
    drawn, numbers = np.split(policy.sample(one, np.random.default_rng(18)), [len(NVEC)], 1)
    shares = np.array([(drawn == combination).all(1).mean() for combination in combinations])
    np.testing.assert_allclose(shares, np.exp(log_p[0, 0]), atol=0.015)
    errors = (numbers.mean(0) - means[0, 0]) / deviations[0, 0], numbers.std(0) / deviations[0, 0] - 1
    np.testing.assert_allclose(errors, np.zeros((2, A)), atol=0.03)
    correlation = np.corrcoef(np.concatenate([drawn[:, [0, 1, 3]], numbers], 1).T)  # choice 2 has one action
    np.testing.assert_allclose(correlation, np.eye(5), atol=0.03)
    likeliest = np.concatenate([combinations[log_p[0, 0].argmax()], means[0, 0]])
    assert (policy.likeliest(p[0, :1]).numpy() == likeliest).all()


def test_actions_and_densities_equal_torchs_distribution():
    generator = torch.Generator().manual_seed(0)
    means, normal = (torch.randn(50, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    deviations = 0.1 + torch.rand(50, 3, generator=generator, dtype=torch.float64)
    actions, densities = squashed_gaussian(means, deviations, normal)
    truth = Independent(TransformedDistribution(Normal(means, deviations), [TanhTransform()]), 1)
    assert torch.allclose(actions, torch.tanh(means + deviations * normal))
    assert torch.allclose(densities, truth.log_prob(actions), atol=1e-6)


def test_densities_stay_finite_where_tanh_saturates():
    actions, densities = squashed_gaussian(torch.tensor([[30.0, -30.0]]), torch.ones(1, 2), torch.zeros(1, 2))
    assert actions.tolist() == [[1.0, -1.0]] and torch.isfinite(densities).all()


def test_gradients_reach_means_and_deviations():
    means = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    deviations = (0.1 + torch.rand(4, 2, dtype=torch.float64)).requires_grad_()
    normal = torch.randn(4, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: squashed_gaussian(*parts, normal), (means, deviations))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="of one shape"):
        squashed_gaussian(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3))
