"""Action-value networks accept every kind of observation, scale pixels and have the published sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.models.dqn import DQNCNN, DQNMLP, DQNMinAtar, DQNSmall
from core.models.layers.torsos import ChannelsLastGroupNorm, q_head, scaled_image
from core.specs import ArraySpec, Discrete, EnvSpec


def pixels(frame, stack):
    return EnvSpec("game", ArraySpec(frame, "uint8"), stack, Discrete(6), is_image=True, max_value=255.0)


ATARI = (84, 84), 4
SHAPES = [((84, 84, 3), 4), ((84, 84), 1), ((84, 84), 0), ((96, 64), 2), ((84, 84, 3), 0)]
HEADS = [(dueling, norm) for dueling in (False, True) for norm in ("none", "group", "layer")]


@pytest.mark.parametrize(
    ("image", "dueling", "norm"), [*((image, False, "none") for image in SHAPES), *((ATARI, *head) for head in HEADS)]
)
def test_the_cnn_accepts_every_image_shape_and_has_any_head(image, dueling, norm):
    spec = pixels(*image)
    model = DQNCNN(DQNCNN.Params(dueling=dueling, norm=norm), spec)
    values, state = model(torch.randint(0, 256, (5, *spec.observation_shape), dtype=torch.uint8))
    assert values.shape == (5, 6) and state == ()


def test_the_plain_cnn_has_the_published_number_of_parameters():
    model = DQNCNN(DQNCNN.Params(), pixels((84, 84), 4))
    expected = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64 + (3136 + 1) * 512 + 513 * 6
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def both(*layers):
    return [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    "model, names",
    [
        (DQNCNN(DQNCNN.Params(), pixels((84, 84), 4)), both("torso.0", "torso.2", "torso.4", "q.0", "q.2")),
        (
            DQNCNN(DQNCNN.Params(norm="group"), pixels((84, 84), 4)),
            [
                "torso.0.weight",
                *both("torso.1"),
                "torso.3.weight",
                *both("torso.4"),
                "torso.6.weight",
                *both("torso.7", "q.0", "q.2"),
            ],
        ),
        (
            DQNSmall(DQNSmall.Params(norm="layer"), pixels((42, 42), 4)),
            both(*(f"torso.{number}" for number in (0, 1, 3, 4, 6, 7)), "q.0", "q.1", "q.3"),
        ),
        (DQNSmall(DQNSmall.Params(), pixels((42, 42), 4)), both("torso.0", "torso.2", "torso.4", "q.0", "q.2")),
        (
            DQNMinAtar(DQNMinAtar.Params(dueling=True), pixels((10, 10), 4)),
            both("torso.0", "q.value.0", "q.value.2", "q.advantage.0", "q.advantage.2"),
        ),
    ],
)
def test_parameters_keep_their_names_in_saved_files(model, names):
    assert list(model.state_dict()) == names


def test_pixels_are_scaled_to_one_and_planes_keep_their_order():
    spec = pixels((84, 84, 3), 2)
    observation = np.random.default_rng(0).integers(0, 256, (2, *spec.observation_shape), np.uint8)
    image = scaled_image(torch.from_numpy(observation), spec)
    assert image.shape == (2, 6, 84, 84) and image.is_contiguous(memory_format=torch.channels_last)
    for frame in range(2):
        for colour in range(3):
            assert np.allclose(
                image[:, 3 * frame + colour].numpy(), observation[:, frame, :, :, colour] / 255.0, atol=1e-6
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, stack", [((84, 84), 4), ((42, 42), 1), ((6, 5), 0), ((12, 8, 3), 2), ((7, 7, 5), 0)])
def test_images_are_the_same_from_any_layout_of_the_bytes(shape, stack, dtype):
    """OpenCV moves the bytes of contiguous stacks, torch those of others."""
    spec = pixels(shape, stack)
    observation = torch.randint(0, 256, (3, *spec.observation_shape), dtype=torch.uint8)
    image = scaled_image(observation, spec, dtype)
    other_layout = scaled_image(observation.transpose(0, 1).contiguous().transpose(0, 1), spec, dtype)
    planes = observation.movedim(-1, -3) if len(shape) == 3 else observation
    expected = planes.reshape(3, -1, *shape[:2]).to(dtype) * (1 / 255)
    assert torch.equal(image, expected) and torch.equal(other_layout, expected)
    assert image.dtype == dtype and image.is_contiguous(memory_format=torch.channels_last)


def test_scaling_leaves_the_pictures_of_an_environment_as_they_are():
    """One plane of floats has the same memory in every layout."""
    spec = EnvSpec("floats", ArraySpec((7, 6), "float32"), 0, Discrete(2), is_image=True, max_value=255.0)
    observation = torch.full((2, 7, 6), 255.0)
    assert torch.equal(scaled_image(observation, spec), torch.ones(2, 1, 7, 6)) and observation.eq(255).all()


def test_a_dueling_network_centres_its_advantages():
    model = DQNCNN(DQNCNN.Params(dueling=True), pixels((84, 84), 4))
    observation = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    features = model.torso(scaled_image(observation, model.spec))
    assert torch.allclose(model(observation)[0].mean(1, keepdim=True), model.q.value(features), atol=1e-5)


def test_a_dueling_head_sends_its_gradient_divided_by_the_root_of_2():
    """1511.06581, section 4.2. The layers of the head itself keep their gradient."""
    torch.manual_seed(0)
    head = q_head(5, 3, SimpleNamespace(hidden=4, dueling=True, noisy=False, norm="none")).double()
    features, upstream = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)

    def combined(features):
        advantage = head.advantage(features)
        return head.value(features) + advantage - advantage.mean(1, keepdim=True)

    gradients = []
    for function in (head, combined):
        leaf = features.clone().requires_grad_()
        inputs = leaf * 1
        outputs = (function(inputs) * upstream).sum() + inputs.sum()  # which have a second reader
        gradients.append(torch.autograd.grad(outputs, [leaf, *head.parameters()]))
    (found, *of_head), (expected, *of_combined) = gradients
    assert torch.allclose(found - 1, (expected - 1) / 2**0.5)
    assert all(map(torch.allclose, of_head, of_combined))


def test_images_too_small_for_the_network_are_refused():
    with pytest.raises(ValueError, match="16x16"):
        DQNCNN(DQNCNN.Params(), pixels((16, 16), 4))


@pytest.mark.parametrize("dueling", [False, True])
def test_minatar_planes_and_vectors_have_their_own_networks(dueling):
    planes = EnvSpec("breakout", ArraySpec((10, 10, 4), "bool"), 0, Discrete(3), is_image=True)
    values, _ = DQNMinAtar(DQNMinAtar.Params(dueling=dueling), planes)(torch.zeros(2, 10, 10, 4, dtype=torch.bool))
    assert values.shape == (2, 3)
    vector = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 0, Discrete(2))
    values, _ = DQNMLP(DQNMLP.Params(dueling=dueling), vector)(torch.zeros(2, 4))
    assert values.shape == (2, 2)


def test_unrolling_a_feed_forward_model_equals_stepping():
    vector = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 0, Discrete(2))
    model = DQNMLP(DQNMLP.Params(), vector)
    observations = torch.randn(5, 3, 4)
    unrolled, _ = model.unroll(observations, torch.zeros(5, 3, dtype=torch.bool), ())
    assert torch.allclose(unrolled, torch.stack([model(step)[0] for step in observations]), atol=1e-6)


PLANES = EnvSpec("breakout", ArraySpec((10, 10, 4), "bool"), 0, Discrete(3), is_image=True)


def test_layer_norm_is_over_the_channels_of_each_position():
    """The network of PQN's authors for MinAtar, computed position by position in float64."""
    torch.manual_seed(0)
    model = DQNMinAtar(DQNMinAtar.Params(norm="layer"), PLANES).double()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    planes = np.random.default_rng(0).random((10, 10, 4)) < 0.3

    def normalized(vector, name):
        centred = (vector - vector.mean()) / np.sqrt(vector.var() + 1e-5)
        return np.maximum(centred * weights[f"{name}.weight"] + weights[f"{name}.bias"], 0)

    features = np.zeros((16, 8, 8))
    for row in range(8):
        for column in range(8):
            patch = planes[row : row + 3, column : column + 3].transpose(2, 0, 1)
            outputs = (weights["torso.0.weight"] * patch).sum((1, 2, 3)) + weights["torso.0.bias"]
            features[:, row, column] = normalized(outputs, "torso.1")
    hidden = normalized(weights["q.0.weight"] @ features.flatten() + weights["q.0.bias"], "q.1")
    expected = weights["q.3.weight"] @ hidden + weights["q.3.bias"]
    model.image_dtype = torch.float64
    values, _ = model(torch.from_numpy(planes[None]))
    np.testing.assert_allclose(values[0].detach().numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("dueling", [False, True])
def test_normalised_layers_begin_he_normal_without_bias(dueling):
    torch.manual_seed(0)
    model = DQNMinAtar(DQNMinAtar.Params(norm="layer", dueling=dueling), PLANES)
    head = model.q.advantage if dueling else model.q
    for layer, inputs in ((model.torso[0], 4 * 9), (head[0], 1024)):
        assert not layer.bias.any()
        assert float(layer.weight.detach().std()) == pytest.approx((2 / inputs) ** 0.5, rel=0.1)
    assert head[3].bias.any()  # the output layer is torch's


def test_group_norm_is_over_the_positions_and_channels_of_each_group():
    norm = ChannelsLastGroupNorm(2, 6).double()
    for parameter in norm.parameters():
        parameter.data.normal_()
    images = torch.randn(3, 6, 5, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    groups = images.numpy().reshape(3, 2, 3 * 5 * 4)
    centred = groups - groups.mean(2, keepdims=True)
    normalized = (centred / np.sqrt(groups.var(2, keepdims=True) + 1e-5)).reshape(3, 6, 5, 4)
    weight, bias = (parameter.detach().numpy()[:, None, None] for parameter in norm.parameters())
    outputs = norm(images)
    np.testing.assert_allclose(outputs.detach().numpy(), weight * normalized + bias, rtol=1e-9, atol=1e-12)
    assert outputs.is_contiguous(memory_format=torch.channels_last)
