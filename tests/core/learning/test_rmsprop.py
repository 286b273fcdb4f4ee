"""RMSProp equals the papers' definition and torch's, each computed in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from core.learning.optimizer import Optimizer, OptimizerParams

DECAY, EPS, RATE = 0.9, 1.5e-3, 0.05


def gradients_of(steps: int = 12) -> np.ndarray:
    """Return gradients [steps, 4] on both sides of the root of eps, one of them constant so that its variance is 0."""
    gradients = np.random.default_rng(0).normal(size=(steps, 4)) * [1e-3, 0.03, 1.0, 0.0]
    gradients[:, 3] = 7.0
    return gradients


def definition(gradients: np.ndarray, centered: bool, in_root: bool, weight_decay: float) -> np.ndarray:
    weight, square, mean = np.ones(4), np.zeros(4), np.zeros(4)
    for gradient in gradients:
        gradient = gradient + weight_decay * weight
        square = DECAY * square + (1 - DECAY) * gradient**2
        mean = DECAY * mean + (1 - DECAY) * gradient
        variance = square - centered * mean**2
        weight = weight - RATE * gradient / (np.sqrt(variance + EPS) if in_root else np.sqrt(variance) + EPS)
    return weight


def ours(gradients: np.ndarray, **settings) -> np.ndarray:
    parameters = [nn.Parameter(torch.ones(1, 2, dtype=torch.float64)) for _ in range(2)]
    params = {"optimizer": "rmsprop", "rmsprop_decay": DECAY, "optimizer_eps": EPS, "learning_rate": RATE}
    optimizer = Optimizer(parameters, OptimizerParams(**params, clip_norm=0.0, **settings))
    for gradient in gradients:
        halves = zip(parameters, torch.from_numpy(gradient).split(2))
        optimizer.step(sum((parameter * half).sum() for parameter, half in halves))
    return torch.cat(parameters, 1).detach().numpy()[0]


@pytest.mark.parametrize("in_root", [True, False])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rmsprop_equals_its_definition(in_root, centered, weight_decay):
    gradients = gradients_of()
    settings = {"rmsprop_centered": centered, "rmsprop_eps_in_root": in_root, "weight_decay": weight_decay}
    expected = definition(gradients, centered, in_root, weight_decay)
    assert ours(gradients, **settings) == pytest.approx(expected, rel=1e-9)
    assert ours(gradients, **{**settings, "rmsprop_eps_in_root": not in_root}) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("centered", [True, False])
def test_epsilon_outside_the_root_is_torchs_rmsprop(centered):
    gradients, weight = gradients_of(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    theirs = torch.optim.RMSprop([weight], lr=RATE, alpha=DECAY, eps=EPS, centered=centered)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        theirs.step()
    found = ours(gradients, rmsprop_centered=centered, rmsprop_eps_in_root=False)
    assert found == pytest.approx(weight.detach().numpy(), rel=1e-9)


def test_a_variance_that_rounding_takes_below_0_counts_as_0():
    weight = nn.Parameter(torch.zeros(1))
    params = {"optimizer": "rmsprop", "rmsprop_decay": 0.5, "optimizer_eps": 1e-30, "learning_rate": 1e-20}
    optimizer = Optimizer([weight], OptimizerParams(**params, clip_norm=0.0))
    for _ in range(400):
        optimizer.step((weight * 3.938461780548096).sum())  # the variance ends at -8.7e-7
    assert bool(torch.isfinite(weight).all())
