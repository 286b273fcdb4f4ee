"""Rainbow's networks: shapes, dueling per atom, and heads with and without each part."""

import pytest
import torch
from torch import nn

from core.models.dqn import DQNCNN, DQNMLP, DQNMinAtar, DQNSmall, RainbowCNN, RainbowMinAtar, RainbowMLP, RainbowSmall
from core.models.layers.noisy_linear import NoisyLinear
from core.specs import ArraySpec, Discrete, EnvSpec
from tests.core.models.test_actor_critic import observe

ACTIONS, BATCH = 6, 3


def pixels(height, width):
    return EnvSpec("game", ArraySpec((height, width), "uint8"), 4, Discrete(ACTIONS), is_image=True, max_value=255.0)


SPECS = {
    RainbowCNN: pixels(84, 84),
    RainbowSmall: pixels(42, 42),
    RainbowMLP: EnvSpec("vector", ArraySpec((5,), "float32"), 2, Discrete(ACTIONS)),
    RainbowMinAtar: EnvSpec("breakout", ArraySpec((10, 10, 4), "bool"), 0, Discrete(ACTIONS), is_image=True),
}
PLAIN = {RainbowCNN: DQNCNN, RainbowSmall: DQNSmall, RainbowMLP: DQNMLP, RainbowMinAtar: DQNMinAtar}
every_network = pytest.mark.parametrize("network", SPECS, ids=lambda network: network.__name__)
every_head = pytest.mark.parametrize("dueling, noisy", [(False, False), (False, True), (True, False), (True, True)])


def make(network, **settings):
    return network(network.Params(**settings), SPECS[network])


@every_head
def test_the_head_has_the_configured_layers(dueling, noisy):
    model = make(RainbowMLP, dueling=dueling, noisy=noisy, atoms=7, hidden=24)
    layers = [layer for layer in model.q.modules() if isinstance(layer, nn.Linear)]
    assert [isinstance(layer, NoisyLinear) for layer in layers] == [noisy] * len(layers)
    expected = [24, 7, 24, 7 * ACTIONS] if dueling else [24, 7 * ACTIONS]
    assert [layer.out_features for layer in layers] == expected
    assert not any(isinstance(layer, NoisyLinear) for layer in model.torso.modules())


@every_network
def test_the_defaults_are_rainbows(network):
    params = network.Params()
    assert (params.dueling, params.noisy, params.sigma, params.atoms) == (True, True, 0.5, 51)


def test_a_dueling_network_centres_the_advantages_of_each_atom():
    model, seen = make(RainbowMLP, noisy=False), []
    model.torso.register_forward_hook(lambda torso, inputs, output: seen.append(output))
    output, _ = model(observe(model.spec, BATCH), ())
    value = model.q.value(seen[0])  # [B, 1, atoms]
    assert value.shape == (BATCH, 1, 51)
    assert torch.allclose(output.mean(1, keepdim=True), value, atol=1e-5)
    advantage = model.q.advantage(seen[0])  # [B, A, atoms]
    for action in range(ACTIONS):
        others = torch.stack([advantage[:, other] for other in range(ACTIONS)]).mean(0)
        assert torch.allclose(output[:, action] - value[:, 0], advantage[:, action] - others, atol=1e-5)


def test_each_atom_of_an_action_has_its_own_weights():
    model = make(RainbowMLP, noisy=False, dueling=False, atoms=4)
    observation = observe(model.spec, BATCH)
    before = model(observation, ())[0]
    with torch.no_grad():
        model.q[2].bias[2 * 4 + 3] += 1.0  # action 2, atom 3
    moved = model(observation, ())[0] - before
    expected = torch.zeros(ACTIONS, 4)
    expected[2, 3] = 1.0
    assert torch.allclose(moved, expected.expand(BATCH, -1, -1), atol=1e-5)


@every_network
def test_the_torso_is_that_of_the_dqn_network(network):
    plain = PLAIN[network](PLAIN[network].Params(), SPECS[network])
    shapes = [
        {name: tensor.shape for name, tensor in model.torso.state_dict().items()} for model in (make(network), plain)
    ]
    assert shapes[0] == shapes[1]


@every_network
@every_head
def test_every_network_gives_a_distribution_for_each_action_and_trains_all_of_it(network, dueling, noisy):
    model = make(network, dueling=dueling, noisy=noisy, atoms=5)
    output, state = model(observe(model.spec, BATCH), ())
    assert output.shape == (BATCH, ACTIONS, 5) and state == () and model.output_kind == "distribution"
    output.log_softmax(-1)[:, 0, 0].sum().backward()
    assert [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ] == []


class OwnKind(RainbowMLP):
    """A network for an agent of a user's own, whose output also holds a distribution for each action."""

    output_kind = "distribution-of-mine"


@pytest.mark.parametrize("dueling", [False, True])
def test_a_network_with_an_output_kind_of_its_own_keeps_the_atoms(dueling):
    spec = SPECS[RainbowMLP]
    model = OwnKind(OwnKind.Params(atoms=7, dueling=dueling), spec)
    assert model(torch.zeros(2, *spec.observation_shape))[0].shape == (2, ACTIONS, 7)
