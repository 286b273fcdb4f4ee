"""Implicit quantile networks equal equation 4 of 1806.06923, and choose fractions to act by."""

import math

import numpy as np
import pytest
import torch

from core.model import draw_noise_per_row
from core.models.iqn import IQNCNN, IQNMLP, IQNMinAtar, IQNSmall
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import QuantileInputs
from tests.core.models.test_actor_critic import observe

ACTIONS, BATCH, NUMBER = 6, 3, 5


def pixels(height, width):
    return EnvSpec("game", ArraySpec((height, width), "uint8"), 4, Discrete(ACTIONS), is_image=True, max_value=255.0)


SPECS = {
    IQNCNN: pixels(84, 84),
    IQNSmall: pixels(42, 42),
    IQNMLP: EnvSpec("vector", ArraySpec((5,), "float32"), 2, Discrete(ACTIONS)),
    IQNMinAtar: EnvSpec("breakout", ArraySpec((10, 10, 4), "bool"), 0, Discrete(ACTIONS), is_image=True),
}


def make(network, **settings):
    torch.manual_seed(1)
    return network(network.Params(**settings), SPECS[network])


@pytest.mark.parametrize("network", SPECS, ids=lambda network: network.__name__)
@pytest.mark.parametrize("dueling, noisy", [(False, False), (False, True), (True, False), (True, True)])
def test_every_network_gives_quantiles_for_each_action(network, dueling, noisy):
    model = make(network, dueling=dueling, noisy=noisy, hidden=24)
    observation, fractions = observe(model.spec, BATCH), torch.rand(BATCH, NUMBER)
    assert model.output_kind == "implicit-quantiles"
    assert model(QuantileInputs(observation, fractions), ())[0].shape == (BATCH, ACTIONS, NUMBER)
    assert model(observation, ())[0].shape == (BATCH, ACTIONS, 32)


@pytest.mark.parametrize("dueling", [False, True])
def test_quantiles_equal_the_papers_equation_4(dueling):
    model = make(IQNMLP, dueling=dueling, hidden=7, cosines=9)
    observation, fractions = observe(model.spec, BATCH), torch.rand(BATCH, NUMBER)
    found = model(QuantileInputs(observation, fractions), ())[0]
    features = model.torso(observation).detach().numpy()
    weight, bias = (part.detach().numpy() for part in model.embedding.linear.parameters())
    for row in range(BATCH):
        for number in range(NUMBER):
            tau = float(fractions[row, number])
            cosines = [math.cos(math.pi * i * tau) for i in range(9)]
            phi = np.maximum(weight @ cosines + bias, 0)
            product = torch.from_numpy(features[row] * phi)[None].float()
            if dueling:
                advantage = model.q.advantage(product)[0]
                expected = model.q.value(product)[0] + advantage - advantage.mean()
            else:
                expected = model.q(product)[0]
            assert torch.allclose(found[row, :, number], expected, atol=1e-6)


def test_in_training_fractions_to_act_by_are_drawn_and_in_evaluation_they_are_midpoints():
    model = make(IQNMLP, acting_quantiles=4)
    observation = observe(model.spec, BATCH)
    assert not torch.equal(model(observation)[0], model(observation)[0])
    model.eval()
    state = torch.get_rng_state()
    expected = model(QuantileInputs(observation, torch.tensor([[0.125, 0.375, 0.625, 0.875]] * BATCH)))[0]
    assert torch.equal(model(observation)[0], expected) and torch.equal(torch.get_rng_state(), state)


def test_the_quantiles_of_an_environment_share_its_noise():
    model = make(IQNMLP, noisy=True)
    draw_noise_per_row(model, True)
    observation = observe(model.spec, BATCH)[:1].expand(BATCH, *model.spec.observation_shape)
    output = model(QuantileInputs(observation, torch.full((BATCH, NUMBER), 0.3)))[0]  # [B, A, N]
    assert torch.allclose(output, output[..., :1].expand_as(output), atol=1e-6)
    assert (output[0] - output[1]).abs().min() > 1e-6
