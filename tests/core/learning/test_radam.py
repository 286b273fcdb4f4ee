"""RAdam equals the papers' definition step by step in float64, on both sides of its threshold, and torch's."""

from math import sqrt

import numpy as np
import pytest
import torch
from torch import nn

from core.learning.optimizer import Optimizer, OptimizerParams

EPS, RATE, STEPS = 1e-3, 0.05, 12  # the length p_t exceeds 5 from step 6 on


def gradients_of() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(STEPS, 4)) * [1e-3, 0.03, 1.0, 30.0]


class RAdamTwin:
    """RAdam on one array, by the definition."""

    def __init__(self, array: np.ndarray, rate: float = RATE, eps: float = EPS):
        self.array, self.mean, self.square, self.t = array, np.zeros_like(array), np.zeros_like(array), 0
        self.rate, self.eps = rate, eps

    def step(self, gradient: np.ndarray) -> None:
        self.t += 1
        self.mean, self.square = 0.9 * self.mean + 0.1 * gradient, 0.999 * self.square + 0.001 * gradient**2
        longest = 2 / (1 - 0.999) - 1
        length, step = longest - 2 * self.t * 0.999**self.t / (1 - 0.999**self.t), self.mean / (1 - 0.9**self.t)
        if length > 5:
            r = sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            step = step * r / (np.sqrt(self.square / (1 - 0.999**self.t)) + self.eps)
        self.array -= self.rate * step


def definition(gradients: np.ndarray, weight_decay: float) -> np.ndarray:
    """Return the weights [steps, 4] after each step."""
    twin, weights = RAdamTwin(np.ones(4)), []
    for gradient in gradients:
        twin.step(gradient + weight_decay * twin.array)
        weights.append(twin.array.copy())
    return np.stack(weights)


def ours(gradients: np.ndarray, planned: bool = False, **settings) -> np.ndarray:
    parameters = [nn.Parameter(torch.ones(1, 2, dtype=torch.float64)) for _ in range(2)]
    params = {"optimizer": "radam", "optimizer_eps": EPS, "learning_rate": RATE, "clip_norm": 0.0, **settings}
    optimizer, weights = Optimizer(parameters, OptimizerParams(**params)), []
    for gradient in gradients:
        if planned:
            optimizer.plan(1)
        halves = zip(parameters, torch.from_numpy(gradient).split(2))
        optimizer.step(sum((parameter * half).sum() for parameter, half in halves))
        weights.append(torch.cat(parameters, 1).detach().numpy()[0].copy())
    return np.stack(weights)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_radam_equals_its_definition(weight_decay):
    gradients = gradients_of()
    expected = definition(gradients, weight_decay)
    np.testing.assert_allclose(ours(gradients, weight_decay=weight_decay), expected, rtol=1e-9)
    # The learning rate of a planned step is a float32.
    np.testing.assert_allclose(ours(gradients, True, weight_decay=weight_decay), expected, rtol=1e-6, atol=1e-6)


def test_radam_equals_torchs_where_eps_does_not_matter():
    gradients, weight = gradients_of(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    theirs = torch.optim.RAdam([weight], lr=RATE, eps=1e-12)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        theirs.step()
    np.testing.assert_allclose(ours(gradients, optimizer_eps=1e-12)[-1], weight.detach().numpy(), rtol=1e-9)


def test_a_planned_step_of_a_non_finite_gradient_changes_nothing():
    gradients = gradients_of()
    with_faults = np.insert(gradients, [3, 8], np.nan, axis=0)
    np.testing.assert_allclose(ours(with_faults, True)[-1], ours(gradients, True)[-1], rtol=1e-12)
