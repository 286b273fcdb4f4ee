"""Munchausen targets equal the paper's sums (2007.14430), computed the slow way in float64."""

import math

import numpy as np
import pytest
import torch

from core.ops.returns import munchausen_bonus, soft_bootstrap

GENERATOR = np.random.default_rng(0)
ALPHA, TEMPERATURE, CLIP = 0.9, 0.03, -1.0
VALUES = np.concatenate([GENERATOR.normal(0, scale, (40, 4)) for scale in (0.01, 0.1, 3.0)])  # [B, A]


def logarithms(values):
    """Return t log pi [A] of one state."""
    total = math.fsum(math.exp((value - max(values)) / TEMPERATURE) for value in values)
    return [value - max(values) - TEMPERATURE * math.log(total) for value in values]


def test_the_bonus_is_the_clipped_log_policy_of_the_action_taken():
    actions = GENERATOR.integers(0, 4, len(VALUES))
    scaled = np.array([logarithms(values)[action] for values, action in zip(VALUES, actions)])
    assert (scaled < CLIP).sum() > 5 and ((scaled > CLIP) & (scaled < -0.1)).sum() > 5 and (scaled > -1e-3).sum() > 5
    bonus = munchausen_bonus(torch.from_numpy(VALUES), torch.from_numpy(actions), ALPHA, TEMPERATURE, CLIP)
    np.testing.assert_allclose(bonus.numpy(), ALPHA * np.clip(scaled, CLIP, 0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("quantiles", [None, 5])
def test_the_bootstrap_is_the_soft_policys_mean_with_its_entropy(quantiles):
    outputs = VALUES if quantiles is None else VALUES[..., None] + GENERATOR.normal(0, 1, (*VALUES.shape, quantiles))
    expected = []
    for values, output in zip(VALUES, outputs):
        scaled = logarithms(values)
        policy = [math.exp(number / TEMPERATURE) for number in scaled]
        assert math.isclose(math.fsum(policy), 1.0)
        expected.append(sum(share * (part - number) for share, part, number in zip(policy, output, scaled)))
    found = soft_bootstrap(torch.from_numpy(VALUES), torch.from_numpy(outputs), TEMPERATURE)
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-9, atol=1e-12)


def test_large_values_stay_finite_in_float32():
    values = torch.tensor([[1e4, -1e4, 0.0]])
    assert soft_bootstrap(values, values, TEMPERATURE).tolist() == [1e4]
    assert munchausen_bonus(values, torch.tensor([1]), ALPHA, TEMPERATURE, CLIP).tolist() == pytest.approx([-0.9])


def test_outputs_of_other_actions_are_refused():
    with pytest.raises(ValueError, match=r"\[B, A\]"):
        soft_bootstrap(torch.ones(3, 2), torch.ones(3, 4, 2), TEMPERATURE)
