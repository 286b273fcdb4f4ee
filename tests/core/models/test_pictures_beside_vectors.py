"""Every model of images reads the vector that stands beside a picture, and joins the features of both."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.learning.precision import in_bf16
from core.models.actor_critic import MinAtarAC
from core.models.dqn import QNetwork
from core.models.layers.torsos import PictureAndVectorTorso, TorsoParams, convolutions, scaled_image, split_frames
from core.models.r2d2 import R2D2MinAtar
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec
from core.types import OARInputs, tree_leaves
from utils.factory import ModelsDict

NUMBERS = 3
IMAGE_MODELS = [name for name in ModelsDict if ModelsDict[name].observations == "image"]


def spec_of(picture, stack=2, continuous=False):
    bound = np.ones(2, np.float32)
    action = Continuous(-bound, bound) if continuous else Discrete(4)
    frame = ArraySpec((math.prod(picture) + 4 * NUMBERS,), "uint8")
    return EnvSpec("test", frame, stack, action, is_image=True, max_value=255.0, picture_of_parts=picture)


def frames_of(picture, vector):
    """Return frames [..., bytes] that hold these pictures [..., H, W] and vectors [..., N]."""
    lead = vector.shape[:-1]
    return torch.from_numpy(np.concatenate([picture.reshape(*lead, -1), vector.astype(np.float32).view(np.uint8)], -1))


def random_parts(spec, *lead, seed=0):
    generator, lead = np.random.default_rng(seed), (*lead, *([spec.frame_stack] if spec.frame_stack else []))
    return generator.integers(0, 256, (*lead, *spec.picture_shape), np.uint8), generator.normal(size=(*lead, NUMBERS))


@pytest.mark.parametrize(("picture", "stack"), [((6, 5), 0), ((6, 5), 3), ((6, 5, 2), 2)])
def test_the_torso_joins_the_features_of_both(picture, stack):
    torch.manual_seed(0)
    spec = spec_of(picture, stack)
    (torso,) = convolutions(spec, (4, 3, 1))
    assert isinstance(torso, PictureAndVectorTorso)
    pictures, vectors = random_parts(spec, 7)
    planes = pictures.reshape(7, max(stack, 1), *spec.picture_shape[:2], -1).transpose(0, 1, 4, 2, 3)  # [B, S, C, H, W]
    floats = torch.from_numpy(planes.reshape(7, -1, 6, 5) / 255.0)
    convolution, linear = torso.double().convolutions[0], torso.vector[1]
    of_picture = F.conv2d(floats, convolution.weight, convolution.bias).relu().flatten(1)
    of_vector = torch.from_numpy(vectors.astype(np.float32)).double().reshape(7, -1) @ linear.weight.T + linear.bias
    expected = torch.cat([of_picture, of_vector.relu()], 1)
    np.testing.assert_allclose(
        torso.float()(frames_of(pictures, vectors)).detach(), expected.detach(), atol=1e-5, rtol=1e-5
    )


def test_a_torso_that_reads_no_vector_is_refused_beside_one():
    class Blind(TorsoParams):
        def layers(self, spec):
            return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten())

    class BlindNetwork(QNetwork, torso=Blind):
        pass

    with pytest.raises(ValueError, match=r"reads no vector beside the picture: let `layers` return with_vector"):
        BlindNetwork(BlindNetwork.Params(), spec_of((6, 5)))
    spec = EnvSpec("test", ArraySpec((6, 5), "uint8"), 2, Discrete(4), is_image=True, max_value=255.0)
    assert BlindNetwork(BlindNetwork.Params(), spec).num_features == 4 * 4 * 3


def test_a_torso_of_ones_own_may_split_the_frames():
    class Joined(nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.spec, self.linear = spec, nn.Linear(2 * NUMBERS, 5)

        def forward(self, frames):
            picture, vector = split_frames(frames, self.spec)
            return torch.cat([scaled_image(picture, self.spec).flatten(1), self.linear(vector.flatten(1))], 1)

    class Own(TorsoParams):
        def layers(self, spec):
            return nn.Sequential(Joined(spec))

    class OwnNetwork(QNetwork, torso=Own):
        pass

    model = OwnNetwork(OwnNetwork.Params(), spec_of((6, 5)))
    assert model.num_features == 2 * 6 * 5 + 5
    assert output_of(model, frames_of(*random_parts(model.spec, 3))).shape == (3, 4)


def small_model(name, lstm=0):
    """Return a small model of this name with random weights."""
    size = 42 if "small" in name else 10 if "minatar" in name else 84
    continuous = ModelsDict[name].output_kind.startswith(("policy", "gaussian"))
    spec = spec_of((size, size), continuous=continuous)
    params = ModelsDict[name].Params()
    sizes = {"hidden": 16, "planes": 4, "feature_size": 8, "width": 1} | ({"lstm": lstm} if lstm else {})
    sizes["hidden"] = (16,) if continuous else 16
    names = {field.name for field in dataclasses.fields(params)}
    torch.manual_seed(0)
    return ModelsDict[name](dataclasses.replace(params, **{key: sizes[key] for key in names & sizes.keys()}), spec)


def output_of(model, frames):
    batch = len(frames)
    recurrent = model.output_kind == "recurrent-q"
    inputs = OARInputs(frames, torch.zeros(batch, dtype=torch.int64), torch.zeros(batch)) if recurrent else frames
    outputs = tree_leaves(model(inputs, model.initial_state(batch))[0])
    if hasattr(model, "critic"):
        outputs.append(model.critic(model.preprocess(frames), torch.zeros(batch, 2)).movedim(0, 1))
    return torch.cat([leaf.reshape(batch, -1) for leaf in outputs], 1)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_outputs_depend_on_both_parts_and_train_both_torsos(name):
    model = small_model(name).eval()
    pictures, vectors = random_parts(model.spec, 2)
    other_pictures, other_vectors = random_parts(model.spec, 2, seed=1)
    output = output_of(model, frames_of(pictures, vectors))
    assert (output != output_of(model, frames_of(other_pictures, vectors))).any()
    assert (output != output_of(model, frames_of(pictures, other_vectors))).any()
    output.square().sum().backward()
    torso = next(module for module in model.modules() if isinstance(module, PictureAndVectorTorso))
    assert all(parameter.grad.abs().sum() > 0 for parameter in torso.vector.parameters())
    assert any(parameter.grad.abs().sum() > 0 for parameter in torso.convolutions.parameters())


@pytest.mark.parametrize("name", ["dqn-small", "r2d2-small", "small-ac"])
def test_bfloat16_is_close_to_float32(name):
    model = small_model(name).eval()
    frames = frames_of(*random_parts(model.spec, 4))
    expected = output_of(model, frames).detach()
    with torch.no_grad():
        found = output_of(in_bf16(model), frames)
    assert found.dtype == torch.float32 and (found != expected).any()
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["r2d2-minatar", "minatar-ac"])
def test_an_unroll_of_both_parts_equals_single_steps(name):
    model, length, batch = small_model(name, lstm=8), 5, 3
    frames = frames_of(*random_parts(model.spec, length, batch))
    firsts = torch.zeros(length, batch, dtype=torch.bool)
    actions, rewards = torch.randint(-1, 4, (length, batch)), torch.randn(length, batch)
    inputs = OARInputs(frames, actions, rewards) if name == "r2d2-minatar" else frames
    unrolled, last = model.unroll(inputs, firsts, model.initial_state(batch))
    state = model.initial_state(batch)
    for step in range(length):
        now = OARInputs(frames[step], actions[step], rewards[step]) if name == "r2d2-minatar" else frames[step]
        output, state = model(now, state)
        for single, whole in zip(tree_leaves(output), tree_leaves(unrolled), strict=True):
            torch.testing.assert_close(single, whole[step])
    torch.testing.assert_close(state, last)


class Sum(nn.Module):
    """Remember the sum of the inputs of an episode."""

    def __init__(self, inputs, units):
        super().__init__()
        self.linear = nn.Linear(inputs, units)

    def initial_state(self, batch_size):
        return (torch.zeros(batch_size, self.linear.out_features),)

    def step(self, features, state):
        total = state[0] + self.linear(features)
        return total, (total,)

    def forward(self, features, firsts, state):
        totals = []
        for inputs, first in zip(features, firsts):
            total, state = self.step(inputs, (state[0].masked_fill(first[:, None], 0.0),))
            totals.append(total)
        return torch.stack(totals), state


@pytest.mark.parametrize("base", [R2D2MinAtar, MinAtarAC])
def test_a_core_of_ones_own_replaces_the_lstm(base):
    network = type("Own", (base,), {"core_class": Sum})
    model = network(network.Params(hidden=16, planes=4, lstm=8), spec_of((10, 10)))
    assert isinstance(model.core, Sum)
    assert [tuple(part.shape) for part in model.initial_state(3)] == [(3, 8)]
    assert output_of(model, frames_of(*random_parts(model.spec, 3))).isfinite().all()
