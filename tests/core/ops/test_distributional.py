"""Distributional operations equal the papers' loops in float64."""

import numpy as np
import pytest
import torch

from core.ops.distributional import (
    categorical_mean,
    categorical_projection,
    implicit_quantile_loss,
    kl_loss,
    quantile_huber_loss,
)
from tests.core.distributions import algorithm_1, quantile_sum, softmax

GENERATOR = np.random.default_rng(5)


def some_distributions(batch, num):
    return softmax(3 * GENERATOR.standard_normal((batch, num)))


def project(probabilities, returns, factors, v_min, v_max):
    tensors = (torch.from_numpy(np.asarray(array, np.float32)) for array in (probabilities, returns, factors))
    return categorical_projection(*tensors, v_min, v_max).double().numpy()


def slopes(function, values, width=1e-5):
    """Return central differences of the sum of `function`, in float64."""
    gradient = np.zeros_like(values)
    for index in np.ndindex(values.shape):
        there, back = values.copy(), values.copy()
        there[index] += width
        back[index] -= width
        gradient[index] = (function(there).sum() - function(back).sum()) / (2 * width)
    return gradient


# projection -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num, v_min, v_max", [(51, -10.0, 10.0), (2, 0.0, 1.0), (11, -3.0, 40.0), (21, 5.0, 7.5)])
def test_the_projection_equals_algorithm_1(num, v_min, v_max):
    probabilities = some_distributions(200, num)
    returns = GENERATOR.uniform(1.5 * v_min - v_max, 1.5 * v_max - v_min, 200)
    factors = GENERATOR.uniform(0, 1, 200)
    factors[:20] = 0
    expected = algorithm_1(probabilities, returns, factors, v_min, v_max)
    np.testing.assert_allclose(project(probabilities, returns, factors, v_min, v_max), expected, atol=2e-5)


def test_atoms_that_fall_on_atoms_keep_all_their_mass():
    probabilities, steps = some_distributions(9, 9), np.arange(9) - 4
    target = project(probabilities, steps * 0.5, np.ones(9), -2.0, 2.0)  # shifted by a whole number of atoms
    for row, step in enumerate(steps):
        expected = np.zeros(9)
        for atom in range(9):
            expected[min(max(atom + step, 0), 8)] += probabilities[row, atom]
        np.testing.assert_allclose(target[row], expected, atol=1e-6)


@pytest.mark.parametrize("broken", ["returns", "factors"])
def test_a_projection_of_nan_is_nan_for_its_sample_alone(broken):
    probabilities, returns, factors = some_distributions(3, 5), np.zeros(3), np.ones(3)
    {"returns": returns, "factors": factors}[broken][1] = np.nan
    target = project(probabilities, returns, factors, -1.0, 1.0)
    assert np.isnan(target[1]).any()
    np.testing.assert_allclose(target[[0, 2]], probabilities[[0, 2]], atol=1e-6)


def test_the_projection_has_no_gradient():
    probabilities = torch.full((1, 3), 1 / 3, requires_grad=True)
    assert not categorical_projection(probabilities, torch.ones(1), torch.ones(1), 0.0, 1.0).requires_grad


def test_the_mean_is_the_sum_over_the_atoms():
    logits = GENERATOR.standard_normal((4, 3, 21))
    expected = (softmax(logits) * np.linspace(-2, 6, 21)).sum(-1)
    np.testing.assert_allclose(categorical_mean(torch.from_numpy(logits), -2.0, 6.0).numpy(), expected, atol=1e-12)


# losses -----------------------------------------------------------------------------------------------------------
def test_the_kl_equals_its_definition():
    logits, target = 4 * GENERATOR.standard_normal((50, 21)), some_distributions(50, 21)
    target[0], target[1] = np.eye(21)[3], np.eye(21)[[3, 4]].mean(0)  # with atoms of no mass
    divergence = np.zeros(50)
    for sample in range(50):
        log_p = np.log(softmax(logits[sample]))
        for atom in range(21):
            if target[sample, atom]:
                divergence[sample] += target[sample, atom] * (np.log(target[sample, atom]) - log_p[atom])
    there = torch.from_numpy(logits).float(), torch.from_numpy(target).float()
    np.testing.assert_allclose(kl_loss(*there).numpy(), divergence, rtol=1e-4, atol=1e-5)


def test_the_kl_from_itself_is_zero():
    logits = torch.randn(7, 51, dtype=torch.float64)
    assert kl_loss(logits, logits.softmax(1)).abs().max() < 1e-12


def test_the_gradient_of_the_kl_is_softmax_minus_target():
    logits, target = GENERATOR.standard_normal((5, 11)), some_distributions(5, 11)
    learnt, fixed = torch.tensor(logits, requires_grad=True), torch.tensor(target, requires_grad=True)
    kl_loss(learnt, fixed).sum().backward()
    np.testing.assert_allclose(learnt.grad.numpy(), softmax(logits) - target, atol=1e-12)
    assert fixed.grad is None


def test_confident_and_wrong_logits_give_a_finite_loss():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert kl_loss(logits, torch.tensor([[0.0, 0.0, 1.0]])).tolist() == [2e4]


@pytest.mark.parametrize("kappa", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("num, others", [(8, 8), (5, 3)])
def test_the_quantile_huber_loss_equals_the_papers_double_sum(kappa, num, others):
    quantiles, target = GENERATOR.normal(0, 2, (40, num)), GENERATOR.normal(0, 2, (40, others))
    errors = target[:, None] - quantiles[:, :, None]
    assert all((sign * errors > edge).any() for sign in (-1, 1) for edge in (0, kappa)) and (abs(errors) < kappa).any()
    losses = quantile_huber_loss(torch.from_numpy(quantiles).float(), torch.from_numpy(target).float(), kappa)
    np.testing.assert_allclose(losses.numpy(), quantile_sum(quantiles, target, kappa), rtol=1e-4)


@pytest.mark.parametrize("kappa", [0.1, 1.0, 3.0])
def test_the_implicit_quantile_loss_equals_the_papers_double_sum(kappa):
    """1806.06923, equation 3: fractions differ between samples, and the Huber loss is divided by kappa."""
    quantiles, target = GENERATOR.normal(0, 2, (40, 8)), GENERATOR.normal(0, 2, (40, 5))
    fractions = GENERATOR.random((40, 8))
    expected = np.zeros(40)
    for sample in range(40):
        for quantile, tau in zip(quantiles[sample], fractions[sample]):
            for atom in target[sample]:
                error = atom - quantile
                huber = error**2 / 2 if abs(error) <= kappa else kappa * (abs(error) - kappa / 2)
                expected[sample] += abs(tau - (error < 0)) * huber / kappa / 5
    tensors = [torch.from_numpy(array) for array in (quantiles, fractions, target)]
    np.testing.assert_allclose(implicit_quantile_loss(*tensors, kappa).numpy(), expected, rtol=1e-10)
    learnt = tensors[0].requires_grad_()
    implicit_quantile_loss(learnt, *tensors[1:], kappa).sum().backward()
    step = 1e-6
    for column in range(8):
        moved = tensors[0].detach().clone()
        moved[:, column] += step
        slope = (implicit_quantile_loss(moved, *tensors[1:], kappa).numpy() - expected) / step
        np.testing.assert_allclose(learnt.grad[:, column].numpy(), slope, atol=1e-4)


def test_an_error_of_kappa_is_equal_on_both_sides_of_the_bend():
    losses = quantile_huber_loss(torch.tensor([[0.0], [0.0]]), torch.tensor([[2.0], [-2.0]]), 2.0)
    assert losses.tolist() == [0.5 * 2.0, 0.5 * 2.0]  # tau = 1/2; 2^2 / 2 = 2 (2 - 2/2)


@pytest.mark.parametrize("kappa", [0.5, 1.0])
def test_the_quantile_huber_gradient_is_the_slope_of_the_loss(kappa):
    quantiles, target = GENERATOR.normal(0, 2, (6, 5)), GENERATOR.normal(0, 2, (6, 4))
    learnt, fixed = torch.tensor(quantiles, requires_grad=True), torch.tensor(target, requires_grad=True)
    quantile_huber_loss(learnt, fixed, kappa).sum().backward()
    expected = slopes(lambda values: quantile_sum(values, target, kappa), quantiles)
    np.testing.assert_allclose(learnt.grad.numpy(), expected, atol=1e-4)
    assert fixed.grad is None


# shapes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: categorical_projection(torch.ones(3), torch.ones(3), torch.ones(3), 0.0, 1.0), r"\[B, N\]"),
        (
            lambda: categorical_projection(torch.ones(3, 5), torch.ones(3, 1), torch.ones(3, 1), 0.0, 1.0),
            r"\[B\] of one shape",
        ),
        (
            lambda: categorical_projection(torch.ones(3, 5), torch.ones(3), torch.ones(5), 0.0, 1.0),
            r"\[B\] of one shape",
        ),
        (lambda: categorical_projection(torch.ones(3, 1), torch.ones(3), torch.ones(3), 0.0, 1.0), "two atoms"),
        (lambda: categorical_projection(torch.ones(3, 5), torch.ones(3), torch.ones(3), 1.0, 1.0), "v_min < v_max"),
        (lambda: kl_loss(torch.ones(3, 5), torch.ones(1, 5)), r"\[B, N\]"),
        (lambda: quantile_huber_loss(torch.ones(3, 5), torch.ones(1, 5), 1.0), r"\[B\] of one shape"),
        (lambda: implicit_quantile_loss(torch.ones(3, 5), torch.ones(3, 4), torch.ones(3, 5), 1.0), r"\[B, N\]"),
        (lambda: quantile_huber_loss(torch.ones(3, 2, 5), torch.ones(3, 5), 1.0), r"\[B, N\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
