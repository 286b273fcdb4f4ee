"""Noisy layers draw factorised noise at each forward pass in training (1706.10295)."""

import math

import pytest
import torch
from torch import nn

from core.model import draw_noise_per_row
from core.models.dqn import DQNCNN, DQNMLP, DQNMinAtar, DQNSmall
from core.models.layers import noisy_linear
from core.models.layers.noisy_linear import NoisyLinear
from core.specs import ArraySpec, Discrete, EnvSpec

SPECS = {DQNCNN: ((84, 84), 4), DQNSmall: ((42, 42), 4), DQNMinAtar: ((10, 10, 4), 0), DQNMLP: ((6,), 0)}
every_model = pytest.mark.parametrize("network", SPECS, ids=lambda network: network.__name__)


def spread_layer(inputs=6, outputs=5):
    """Return a layer with distinct sigmas."""
    layer = NoisyLinear(inputs, outputs)
    with torch.no_grad():
        layer.weight_sigma.uniform_(0.5, 2)
        layer.bias_sigma.uniform_(0.5, 2)
    return layer


@torch.no_grad()
def drawn(layer):
    """Return weights [outputs, inputs] and biases [outputs] of one forward pass.

    They follow from the outputs for 0 and the unit vectors.
    """
    outputs = layer(torch.cat([torch.zeros(1, layer.in_features), torch.eye(layer.in_features)]))
    return (outputs[1:] - outputs[0]).T, outputs[0]


def make(network, **settings):
    frame, stack = SPECS[network]
    image = len(frame) > 1
    spec = EnvSpec("game", ArraySpec(frame, "uint8" if image else "float32"), stack, Discrete(3), is_image=image)
    return network(network.Params(**settings), spec)


def observe(model):
    return torch.ones(2, *model.spec.observation_shape, dtype=torch.uint8 if model.spec.is_image else torch.float32)


def test_with_noise_per_row_every_row_has_a_draw_of_its_own():
    layer = spread_layer()
    draw_noise_per_row(layer, True)
    inputs, state = torch.randn(3, 6), torch.get_rng_state()
    found = layer(inputs)
    torch.set_rng_state(state)
    for row, noise in enumerate(torch.randn(3, 11)):
        noise = noise.sign() * noise.abs().sqrt()
        weight = layer.weight + layer.weight_sigma * torch.outer(noise[6:], noise[:6])
        assert torch.allclose(found[row], weight @ inputs[row] + layer.bias + layer.bias_sigma * noise[6:], atol=1e-5)


@pytest.mark.parametrize("rows, large", [(32, True), (33, False)])
def test_a_large_layer_adds_noise_to_its_weights_only_for_many_rows(rows, large):
    layer = NoisyLinear(1025, 1024)
    inputs = torch.randn(rows, 1025)
    torch.manual_seed(3)
    found = layer(inputs)
    assert ("AddcmulBackward0" not in str(found.grad_fn.next_functions)) == large
    torch.manual_seed(3)
    noise = torch.randn(2049).double()
    noise = noise.sign() * noise.abs().sqrt()
    weight = layer.weight.double() + layer.weight_sigma.double() * torch.outer(noise[1025:], noise[:1025])
    bias = layer.bias.double() + layer.bias_sigma.double() * noise[1025:]
    assert torch.allclose(found.double(), inputs.double() @ weight.T + bias, atol=1e-4)


def test_in_evaluation_a_layer_uses_its_means():
    layer, inputs = NoisyLinear(4, 3).eval(), torch.randn(2, 4)
    state = torch.get_rng_state()
    assert torch.equal(layer(inputs), inputs @ layer.weight.T + layer.bias)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


@pytest.mark.parametrize("many", [0, 2**20])
def test_weight_noise_is_an_outer_product_with_the_bias_noise(monkeypatch, many):
    monkeypatch.setattr(noisy_linear, "MANY_WEIGHTS", many)
    layer = spread_layer()
    for _ in range(20):
        weight, bias = drawn(layer)
        of_weights = ((weight - layer.weight) / layer.weight_sigma).double()  # f(q) f(p)^T
        of_biases = ((bias - layer.bias) / layer.bias_sigma).double()  # f(q)
        singular = torch.linalg.svdvals(of_weights)
        assert singular[1] < 1e-4 * singular[0]
        of_inputs = of_weights[0] / of_biases[0]  # f(p)
        assert torch.allclose(of_weights, torch.outer(of_biases, of_inputs), atol=1e-3)


def test_the_factors_are_signed_roots_of_unit_gaussians():
    layer = spread_layer(400, 500)
    gaussians = []
    for _ in range(20):
        weight, bias = drawn(layer)
        of_biases = (bias - layer.bias) / layer.bias_sigma
        of_inputs = ((weight - layer.weight) / layer.weight_sigma / of_biases[:, None])[of_biases.abs().argmax()]
        gaussians += [of_biases * of_biases.abs(), of_inputs * of_inputs.abs()]  # the inverse of f
    for samples in (torch.cat(gaussians[0::2]), torch.cat(gaussians[1::2])):
        mean, deviation, kurtosis = samples.mean(), samples.std(), (samples**4).mean()
        assert abs(mean) < 0.05 and abs(deviation - 1) < 0.05 and abs(kurtosis - 3) < 0.4


@pytest.mark.parametrize("sigma", [0.5, 0.1])
def test_parameters_are_initialised_as_in_the_paper(sigma):
    layer = NoisyLinear(100, 2000, sigma)
    for name in ("weight_sigma", "bias_sigma"):
        assert torch.allclose(getattr(layer, name), torch.tensor(sigma / 10))
    for mean in (layer.weight.detach(), layer.bias.detach()):  # uniform in +- 1 / sqrt(100)
        assert 0.099 < float(mean.abs().max()) <= 0.1 and float(mean.abs().mean()) == pytest.approx(0.05, rel=0.05)


def test_the_default_sigma_is_the_papers_half():
    assert NoisyLinear(4, 1).bias_sigma.item() == 0.25


@pytest.mark.parametrize("many", [0, 2**20])
def test_gradients_of_means_and_sigmas_equal_those_by_hand(monkeypatch, many):
    monkeypatch.setattr(noisy_linear, "MANY_WEIGHTS", many)  # 0: a second product for few rows, here 7
    layer, inputs, upstream = spread_layer(), torch.randn(7, 6), torch.randn(7, 5)
    state = torch.get_rng_state()
    weight, bias = drawn(layer)
    torch.set_rng_state(state)
    (layer(inputs) * upstream).sum().backward()
    of_weights, of_biases = (weight - layer.weight) / layer.weight_sigma, (bias - layer.bias) / layer.bias_sigma
    assert torch.allclose(layer.weight.grad, upstream.T @ inputs, atol=1e-4)
    assert torch.allclose(layer.bias.grad, upstream.sum(0), atol=1e-4)
    assert torch.allclose(layer.weight_sigma.grad, (upstream.T @ inputs) * of_weights, atol=1e-3)
    assert torch.allclose(layer.bias_sigma.grad, upstream.sum(0) * of_biases, atol=1e-4)


@every_model
@pytest.mark.parametrize("dueling", [False, True])
def test_every_dqn_network_can_have_a_noisy_head(network, dueling):
    model = make(network, noisy=True, dueling=dueling, sigma=0.2)
    layers = [layer for layer in model.q.modules() if isinstance(layer, nn.Linear)]
    assert len(layers) == (4 if dueling else 2) and all(isinstance(layer, NoisyLinear) for layer in layers)
    assert all(layer.bias_sigma[0].item() == pytest.approx(0.2 / math.sqrt(layer.in_features)) for layer in layers)
    observation = observe(model)
    assert not torch.equal(model(observation)[0], model(observation)[0])
    model.eval()
    assert torch.equal(model(observation)[0], model(observation)[0]) and model(observation)[0].shape == (2, 3)


def test_a_dueling_head_draws_noise_for_its_advantage_first():
    model = make(DQNMLP, noisy=True, dueling=True)
    observation = observe(model)
    torch.manual_seed(3)
    found = model(observation)[0]
    torch.manual_seed(3)
    features = model.torso(observation)
    advantage = model.q.advantage(features)
    assert torch.equal(found, model.q.value(features) + advantage - advantage.mean(1, keepdim=True))
