"""The squashed Gaussian equals torch's transformed distribution in float64."""

import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from core.ops.policy_distributions import squashed_gaussian


def test_actions_and_densities_equal_torchs_distribution():
    generator = torch.Generator().manual_seed(0)
    means, normal = (torch.randn(50, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    deviations = 0.1 + torch.rand(50, 3, generator=generator, dtype=torch.float64)
    actions, densities = squashed_gaussian(means, deviations, normal)
    truth = Independent(TransformedDistribution(Normal(means, deviations), [TanhTransform()]), 1)
    assert torch.allclose(actions, torch.tanh(means + deviations * normal))
    assert torch.allclose(densities, truth.log_prob(actions), atol=1e-6)


def test_the_density_integrates_to_one():
    """The mean of 1 / density over 100,000 draws is the length of the range, 2."""
    normal = torch.randn(100_000, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, densities = squashed_gaussian(torch.zeros_like(normal), torch.full_like(normal, 0.8), normal)
    assert float((-densities).exp().mean()) == pytest.approx(2, rel=0.05)


def test_densities_stay_finite_where_tanh_saturates():
    actions, densities = squashed_gaussian(torch.tensor([[30.0, -30.0]]), torch.ones(1, 2), torch.zeros(1, 2))
    assert actions.tolist() == [[1.0, -1.0]] and torch.isfinite(densities).all()


def test_gradients_reach_means_and_deviations():
    means, deviations = (torch.rand(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    normal = torch.randn(4, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: squashed_gaussian(*parts, normal), (means, deviations))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="of one shape"):
        squashed_gaussian(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3))
