"""The rescaling of returns equals the paper's form, a root finder and extended precision."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from core.ops.returns import rescaled, unrescaled

EPS = (1e-3, 1e-2, 1.0)
MAGNITUDES = np.concatenate([[0.0], np.logspace(-12, 9, 200)])
VALUES = torch.from_numpy(np.concatenate([-MAGNITUDES[::-1], MAGNITUDES]))


def paper(x: float, eps: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def bisected(y: float, eps: float) -> float:
    """Return the x at which the paper's h(x) = y, by bisection."""
    low, high = -1e12, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if paper(middle, eps) < y else (low, middle)
    return (low + high) / 2


@pytest.mark.parametrize("eps", EPS)
def test_rescaling_equals_the_papers_function(eps):
    expected = [paper(x, eps) for x in VALUES.tolist()]
    np.testing.assert_allclose(rescaled(VALUES, eps).numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("eps", EPS)
def test_the_inverse_equals_a_root_finders(eps):
    targets = torch.tensor([-4000.0, -33.0, -1.0, -0.01, 0.0, 0.3, 1.0, 7.5, 250.0, 1e5], dtype=torch.float64)
    expected = [bisected(y, eps) for y in targets.tolist()]
    np.testing.assert_allclose(unrescaled(targets, eps).numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eps", EPS)
def test_the_inverse_equals_the_papers_proposition(eps):
    """The closed form is computed with enough digits for its cancellation."""
    with localcontext() as context:
        context.prec = 60
        one, exact = Decimal(1), Decimal(eps)
        expected = []
        for y in map(Decimal, VALUES.tolist()):
            inner = ((one + 4 * exact * (abs(y) + 1 + exact)).sqrt() - 1) / (2 * exact)
            expected.append(float((inner * inner - 1).copy_sign(y)) if y else 0.0)
    np.testing.assert_allclose(unrescaled(VALUES, eps).numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("eps", (0.0, *EPS))
def test_each_function_inverts_the_other_at_all_magnitudes(eps):
    for there, back in ((rescaled, unrescaled), (unrescaled, rescaled)):
        np.testing.assert_allclose(back(there(VALUES, eps), eps).numpy(), VALUES.numpy(), rtol=1e-12)


@pytest.mark.parametrize("function", [rescaled, unrescaled])
def test_single_precision_is_accurate_near_zero_and_far_from_it(function):
    values = torch.cat([VALUES[VALUES < 0], VALUES[VALUES > 0]]).float()
    relative = (function(values, 1e-3).double() / function(values.double(), 1e-3) - 1).abs()
    assert float(relative.max()) < 1e-6
