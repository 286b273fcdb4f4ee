"""Spectral normalisation divides a convolution's weight by its largest singular value, found by an SVD."""

import pytest
import torch

from core.models.dqn import DQNResNet, RainbowResNet
from core.models.iqn import IQNResNet
from core.models.layers.spectral_norm import SpectralConv2d
from core.models.layers.torsos import scaled_image
from core.models.r2d2 import R2D2ResNet
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import OARInputs

SPEC = EnvSpec("game", ArraySpec((84, 84), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)


def make():
    torch.manual_seed(0)
    return SpectralConv2d(5, 7, 3, padding=1)


def test_after_convergence_the_largest_singular_value_is_1():
    layer = make()
    layer.weight.data.mul_(13.0)
    for _ in range(300):
        layer.normalized_weight()
    exact = torch.linalg.svdvals(layer.weight.detach().double().flatten(1))[0]
    found = layer.normalized_weight().detach()
    assert torch.allclose(found.double(), layer.weight.detach().double() / exact, rtol=1e-5, atol=1e-7)
    image = torch.randn(2, 5, 6, 6)
    expected = torch.nn.functional.conv2d(image, found, layer.bias, padding=1)
    assert torch.allclose(layer(image), expected, atol=1e-6)


def test_evaluation_changes_no_estimate():
    layer = make().eval()
    before = layer.u.clone()
    layer(torch.randn(1, 5, 6, 6))
    assert torch.equal(layer.u, before)
    layer.train()(torch.randn(1, 5, 6, 6))
    assert not torch.equal(layer.u, before)


def test_acting_changes_no_estimate():
    """Exploring actors of noisy networks are in training mode."""
    layer = make()
    before = layer.u.clone()
    with torch.inference_mode():
        layer(torch.randn(1, 5, 6, 6))
    assert torch.equal(layer.u, before)


def test_a_target_network_changes_no_estimate_and_takes_a_shorter_one():
    layer = make().requires_grad_(False)
    before, weight = layer.u.clone(), layer.normalized_weight()
    assert torch.equal(layer.u, before)
    layer.u.mul_(0.5)
    assert torch.allclose(layer.normalized_weight(), weight)


def test_the_gradient_sees_the_singular_value():
    """The normalised weight does not change with the scale of the weight, so its gradient is orthogonal to it."""
    layer = make()
    for _ in range(300):
        layer.normalized_weight()
    (layer.normalized_weight() * torch.randn(7, 5, 3, 3)).sum().backward()
    assert layer.weight.grad.norm() > 0.1
    assert float((layer.weight.grad * layer.weight.detach()).sum().abs()) < 1e-4


@pytest.mark.parametrize("network", [DQNResNet, RainbowResNet, IQNResNet, R2D2ResNet])
def test_btrs_torso_serves_every_agent_with_replay(network):
    model = network(network.Params(), SPEC)
    assert sum(isinstance(layer, SpectralConv2d) for layer in model.modules()) == 12
    images = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    assert features_of(model, images) == 64 * 6 * 6
    inputs = OARInputs(images, torch.tensor([-1, 3]), torch.zeros(2)) if network is R2D2ResNet else images
    assert model(inputs, model.initial_state(2))[0].shape[:2] == (2, 6)
    plain = network(network.Params(spectral_norm=False, pool=0, width=1), SPEC)
    assert not any(isinstance(layer, SpectralConv2d) for layer in plain.modules())
    assert features_of(plain, images) == 32 * 11 * 11


def features_of(model, images):
    """Return the number of features that leave the last pool or convolution, which nn.Flatten makes flat."""
    layers = list(model.torso)
    end = 1 + next(index for index, layer in enumerate(layers) if isinstance(layer, torch.nn.Flatten))
    return torch.nn.Sequential(*layers[:end])(scaled_image(images, SPEC)).shape[1]
