"""Every actor-critic network, with and without LSTM: shapes, unrolls, state resets, gradients, published sizes."""

import numpy as np
import pytest
import torch
from torch import nn

from core.models.actor_critic import MLPAC, FeatureAC, ImpalaCNN, ImpalaResNet, MinAtarAC, NatureAC, SmallAC
from core.models.layers.torsos import ResidualBlock
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec
from core.types import ActorCriticOutput, restart

LENGTH, BATCH, ACTIONS = 6, 3, 5


def pixels(height, width, stack=4):
    return EnvSpec(
        "game", ArraySpec((height, width), "uint8"), stack, Discrete(ACTIONS), is_image=True, max_value=255.0
    )


ATARI, SMALL = pixels(84, 84), pixels(42, 42)
MINATAR = EnvSpec("breakout", ArraySpec((10, 10, 4), "bool"), 0, Discrete(ACTIONS), is_image=True)
VECTOR = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2, Discrete(ACTIONS))
SIZES = {
    ImpalaCNN: (ATARI, 256),
    ImpalaResNet: (ATARI, 256),
    NatureAC: (ATARI, 512),
    FeatureAC: (ATARI, 128),
    SmallAC: (SMALL, 256),
    MinAtarAC: (MINATAR, 128),
    MLPAC: (VECTOR, 64),
}  # the observations of each network, and F without an LSTM
IMAGE_MODELS = [network for network, (spec, _) in SIZES.items() if spec.is_image]

every_network = pytest.mark.parametrize("network", SIZES, ids=lambda network: network.__name__)
every_memory = pytest.mark.parametrize("lstm", [0, 32])


def make(network, lstm=0, **settings):
    return network(network.Params(lstm=lstm, **settings), SIZES[network][0])


def observe(spec, *sizes):
    if spec.frame.dtype == "float32":
        return torch.randn(*sizes, *spec.observation_shape)
    pictures = torch.randint(0, 256, (*sizes, *spec.observation_shape), dtype=torch.uint8)
    return pictures > 127 if spec.frame.dtype == "bool" else pictures


def some_state(model):
    return tuple(torch.randn_like(part) for part in model.initial_state(BATCH))


def close(one, other):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


@every_network
@every_memory
def test_a_step_gives_logits_value_features_and_state(network, lstm):
    model = make(network, lstm)
    output, state = model(observe(model.spec, BATCH), model.initial_state(BATCH))
    size = SIZES[network][1] if network is FeatureAC or not lstm else lstm
    assert isinstance(output, ActorCriticOutput) and model.feature_size == size
    assert [tuple(part.shape) for part in output] == [(BATCH, ACTIONS), (BATCH,), (BATCH, size)]
    assert [tuple(part.shape) for part in state] == [(BATCH, lstm)] * (2 if lstm else 0)


@every_network
@every_memory
def test_unrolling_equals_stepping_with_restarts(network, lstm):
    model = make(network, lstm)
    observations, firsts = observe(model.spec, LENGTH, BATCH), torch.rand(LENGTH, BATCH) < 0.3
    assert firsts[1:].any() and not firsts.all()
    before, initial = some_state(model), model.initial_state(BATCH)
    unrolled, final = model.unroll(observations, firsts, before)
    state, steps = before, []
    for observation, first in zip(observations, firsts):
        output, state = model(observation, restart(state, first, initial))
        steps.append(output)
    stepped = ActorCriticOutput(*(torch.stack(parts) for parts in zip(*steps)))
    assert [part.shape[:2] for part in unrolled] == [(LENGTH, BATCH)] * 3
    assert close(unrolled, stepped) and close(final, state)


class DoubledMLP(MLPAC):
    def heads(self, features, inputs=None):
        output = super().heads(features, inputs)
        return output._replace(value=2 * output.value)


@every_memory
def test_a_subclass_changes_the_heads_of_steps_and_of_unrolls(lstm):
    plain, doubled = make(MLPAC, lstm), DoubledMLP(MLPAC.Params(lstm=lstm), VECTOR)
    doubled.load_state_dict(plain.state_dict())
    state, observations, firsts = some_state(plain), observe(VECTOR, LENGTH, BATCH), torch.zeros(LENGTH, BATCH) > 0
    assert torch.equal(doubled(observations[0], state)[0].value, 2 * plain(observations[0], state)[0].value)
    values = plain.unroll(observations, firsts, state)[0].value
    assert torch.equal(doubled.unroll(observations, firsts, state)[0].value, 2 * values)


@every_network
@every_memory
def test_the_loss_reaches_every_parameter(network, lstm):
    model = make(network, lstm)
    firsts = torch.zeros(LENGTH, BATCH, dtype=torch.bool)
    firsts[2] = True
    output, _ = model.unroll(observe(model.spec, LENGTH, BATCH), firsts, model.initial_state(BATCH))
    (output.logits.log_softmax(-1)[..., 0].sum() + output.value.square().sum()).backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert without == []


@pytest.mark.parametrize("network", [FeatureAC, MLPAC])  # with and without a feature head
@every_memory
def test_policy_and_value_are_linear_in_the_features(network, lstm):
    model = make(network, lstm)
    output, state = model(observe(model.spec, BATCH), some_state(model))
    assert torch.allclose(output.features @ model.policy.weight.T + model.policy.bias, output.logits, atol=1e-6)
    assert torch.allclose(output.features @ model.value.weight[0] + model.value.bias, output.value, atol=1e-5)
    if lstm and network is not FeatureAC:
        assert torch.equal(output.features, state[0])


@every_network
def test_the_initial_policy_is_almost_uniform(network):
    model = make(network)
    output, _ = model(observe(model.spec, BATCH), ())
    assert (output.logits.softmax(-1) - 1 / ACTIONS).abs().max() < 0.02


def test_weights_begin_orthogonal_by_the_gain_of_their_part_and_biases_zero():
    for model in make(FeatureAC), make(MLPAC, value_torso=True):
        bodies = [(part, 2**0.5) for part in (model.torso, model.feature_head, model.value_torso) if part is not None]
        for part, gain in (*bodies, (model.policy, 0.01), (model.value, 1.0)):
            for layer in part.modules():
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    weight = layer.weight.flatten(1) / gain
                    weight = weight if len(weight) <= weight.shape[1] else weight.T
                    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), atol=1e-4, rtol=0)
                    assert not layer.bias.any()


def test_activation_and_first_deviation_of_the_vector_network_are_options():
    spec = EnvSpec("Pendulum-v1", ArraySpec((3,), "float32"), 0, Continuous(np.full(2, -2.0), np.full(2, 2.0)))
    model = MLPAC(MLPAC.Params(activation="relu", log_std=-2.0, value_torso=True), spec)
    output, _ = model(torch.randn(BATCH, 3), ())
    assert (output.logits[:, 2:] == -2.0).all() and model.log_deviations.requires_grad
    hidden = [layer for torso in (model.torso, model.value_torso) for layer in torso if not list(layer.parameters())]
    assert [type(layer) for layer in hidden if not isinstance(layer, nn.Flatten)] == [nn.ReLU] * 4
    features = nn.functional.relu(model.torso[3](nn.functional.relu(model.torso[1](torch.ones(1, 3)))))
    torch.testing.assert_close(model(torch.ones(1, 3), ())[0].features, features)


def test_the_feature_head_has_the_configured_size():
    model = make(FeatureAC, lstm=32, feature_size=7)
    output, _ = model(observe(model.spec, BATCH), model.initial_state(BATCH))
    assert output.features.shape == (BATCH, 7) and (output.features >= 0).all()


@pytest.mark.parametrize("network", IMAGE_MODELS, ids=lambda network: network.__name__)
def test_the_brightest_pixel_is_scaled_to_one(network):
    model, seen = make(network), []
    model.torso.register_forward_pre_hook(lambda torso, inputs: seen.append(inputs[0]))
    white = torch.full_like(observe(model.spec, 2), int(model.spec.max_value))
    model(white, ())
    assert torch.allclose(seen[0], torch.ones_like(seen[0])) and seen[0].is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize(
    "network",
    [network for network in dict.fromkeys(IMAGE_MODELS) if network is not ImpalaResNet],
    ids=lambda network: network.__name__,
)
def test_images_too_small_for_a_network_are_refused(network):
    with pytest.raises(ValueError, match="2x2"):
        network(network.Params(), pixels(2, 2))


@pytest.mark.parametrize("height, width", [(1, 1), (96, 72), (10, 13)])
def test_the_residual_network_accepts_images_of_every_size(height, width):
    model = ImpalaResNet(ImpalaResNet.Params(), pixels(height, width))
    assert model(observe(model.spec, 2), ())[0].logits.shape == (2, ACTIONS)


def heads(features):
    return (features + 1) * ACTIONS + features + 1


def test_impalas_shallow_network_has_the_published_layers():
    convolutions = (4 * 64 + 1) * 16 + (16 * 16 + 1) * 32
    expected = convolutions + (9 * 9 * 32 + 1) * 256 + heads(256)  # (84 - 8) / 4 + 1 = 20, (20 - 4) / 2 + 1 = 9
    assert sum(parameter.numel() for parameter in make(ImpalaCNN).parameters()) == expected


def test_impalas_deep_network_has_the_published_layers():
    entries = (4 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 9 + 1) * 32
    blocks = 4 * (16 * 9 + 1) * 16 + 8 * (32 * 9 + 1) * 32  # two blocks of two convolutions in each of three sections
    expected = entries + blocks + (11 * 11 * 32 + 1) * 256 + heads(256)  # 84 -> 42 -> 21 -> 11
    model = make(ImpalaResNet)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in model.modules()) == 15


def test_an_lstm_adds_its_gates_and_narrows_the_heads():
    difference = sum(p.numel() for p in make(ImpalaCNN, 32).parameters()) - sum(
        p.numel() for p in make(ImpalaCNN).parameters()
    )
    assert difference == 4 * 32 * (256 + 32 + 2) + heads(32) - heads(256)


def test_a_residual_block_adds_to_its_unchanged_input():
    model = make(ImpalaResNet)
    block, x = model.torso[0][2], torch.randn(2, 16, 5, 5)
    with torch.no_grad():
        for layer in (block.inner, block.outer):
            layer.weight.zero_()
        assert torch.equal(block(x.clone()), x)


def test_a_residual_block_is_its_formula():
    """The kernels have their centre alone, so the block is a function of each number."""
    block, x = ResidualBlock(2), torch.linspace(-2, 2, 2 * 5 * 5).view(1, 2, 5, 5)
    with torch.no_grad():
        for layer, factor, bias in ((block.inner, 2.0, -1.0), (block.outer, 3.0, 0.5)):
            layer.weight.zero_()
            layer.weight[range(2), range(2), 1, 1] = factor
            layer.bias.fill_(bias)
        expected = [each + 3 * max(2 * max(each, 0) - 1, 0) + 0.5 for each in x.flatten().tolist()]
        assert block(x).flatten().tolist() == pytest.approx(expected)


@every_network
@every_memory
@pytest.mark.cuda
def test_a_gpu_unrolls_like_the_cpu(network, lstm):
    model, firsts = make(network, lstm), torch.rand(LENGTH, BATCH) < 0.3
    observations = observe(model.spec, LENGTH, BATCH)
    expected, _ = model.unroll(observations, firsts, model.initial_state(BATCH))
    model = model.cuda()
    actual, state = model.unroll(observations.cuda(), firsts, model.initial_state(BATCH))
    assert all(part.is_cuda for part in state)
    assert all(torch.allclose(a.cpu(), b, atol=1e-2) for a, b in zip(actual, expected))  # TF32
