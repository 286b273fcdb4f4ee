"""Returns and the targets made of them equal the papers' sums, computed step by step in float64 or more."""

import math

import numpy as np
import pytest
import torch

from core.ops.returns import (
    bootstrap_position,
    generalised_advantages,
    munchausen_bonus,
    n_step_return,
    rescaled,
    soft_bootstrap,
    unrescaled,
)


def walk(rewards, discounts, lasts, gamma):
    """Return the paper's sum for one window, its bootstrap discount and the bootstrap position."""
    total, factor = 0.0, 1.0
    length = len(rewards) - 1
    for k in range(length):
        if lasts[k]:
            return total, factor, k
        total += factor * rewards[k]
        factor *= gamma * discounts[k]
    return total, factor, length if not lasts[:length].any() else int(lasts.argmax())


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_returns_equal_the_step_by_step_sum(length):
    generator = np.random.default_rng(length)
    rewards = generator.normal(size=(length + 1, 400))
    lasts = generator.random((length + 1, 400)) < 0.2
    lasts[0] = False  # a last step is never a start
    discounts = (generator.random((length + 1, 400)) > 0.15).astype(np.float64)
    returns, factors = n_step_return(*map(torch.from_numpy, (rewards, discounts, lasts)), 0.97)
    positions = bootstrap_position(torch.from_numpy(lasts))
    for column in range(400):
        expected = walk(rewards[:, column], discounts[:, column], lasts[:, column], 0.97)
        assert (float(returns[column]), float(factors[column])) == pytest.approx(expected[:2], abs=1e-12)
        if lasts[:, column].any():
            assert int(positions[column]) == lasts[:, column].argmax()
        else:
            assert int(positions[column]) == length


def test_the_bootstrap_position_leaves_its_argument_as_it_was():
    lasts = torch.zeros(3, 2, dtype=torch.bool)
    bootstrap_position(lasts)
    assert not lasts.any()


def test_windows_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[n \+ 1, B\]"):
        n_step_return(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.bool), 0.9)


@pytest.mark.parametrize("trace_lambda", [0.0, 0.9, 1.0])
def test_generalised_advantages_are_sums_of_errors_up_to_an_episodes_end(trace_lambda):
    generator, length, streams = np.random.default_rng(0), 9, 100
    rewards, values = generator.normal(size=(length, streams)), generator.normal(size=(length + 1, streams))
    included = generator.random((length, streams)) > 0.2
    discounts = 0.97 * (generator.random((length, streams)) > 0.2)
    rewards[~included] = np.nan  # of steps without an action nothing is read
    found = generalised_advantages(*map(torch.from_numpy, (rewards, discounts, values, included)), trace_lambda)
    for b in range(streams):
        for s in range(length):
            expected, product = 0.0, 1.0
            for t in range(s, length):
                if not included[t, b]:
                    break
                expected += product * (rewards[t, b] + discounts[t, b] * values[t + 1, b] - values[t, b])
                product *= discounts[t, b] * trace_lambda
            assert float(found[0][s, b]) == pytest.approx(expected, abs=1e-12)
            assert float(found[1][s, b]) == pytest.approx(values[s, b] + expected, abs=1e-12)


def test_generalised_advantages_carry_no_gradient():
    rows, values = torch.ones(3, 2), torch.ones(4, 2, requires_grad=True)
    found = generalised_advantages(rows, rows, values, rows.bool(), 0.9)
    assert [tensor.requires_grad for tensor in found] == [False, False]


def test_generalised_advantages_refuse_shapes_that_do_not_fit():
    rows = torch.zeros(3, 2)
    for wrong in ((rows, rows, rows, rows.bool()), (rows, rows[:2], torch.zeros(4, 2), rows.bool())):
        with pytest.raises(ValueError, match=r"\[T, B\] of one shape"):
            generalised_advantages(*wrong, 0.9)


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


EPS = (1e-3, 1e-2, 1.0)
MAGNITUDES = np.concatenate([[0.0], np.logspace(-12, 9, 200)])
RESCALED_VALUES = torch.from_numpy(np.concatenate([-MAGNITUDES[::-1], MAGNITUDES]))


def paper(x: float, eps: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


@pytest.mark.parametrize("eps", EPS)
def test_rescaling_equals_the_papers_function(eps):
    expected = [paper(x, eps) for x in RESCALED_VALUES.tolist()]
    np.testing.assert_allclose(rescaled(RESCALED_VALUES, eps).numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("eps", (0.0, *EPS))
def test_each_function_inverts_the_other_at_all_magnitudes(eps):
    for there, back in ((rescaled, unrescaled), (unrescaled, rescaled)):
        np.testing.assert_allclose(back(there(RESCALED_VALUES, eps), eps).numpy(), RESCALED_VALUES.numpy(), rtol=1e-12)


@pytest.mark.parametrize("function", [rescaled, unrescaled])
def test_single_precision_is_accurate_near_zero_and_far_from_it(function):
    values = torch.cat([RESCALED_VALUES[RESCALED_VALUES < 0], RESCALED_VALUES[RESCALED_VALUES > 0]]).float()
    relative = (function(values, 1e-3).double() / function(values.double(), 1e-3) - 1).abs()
    assert float(relative.max()) < 1e-6
