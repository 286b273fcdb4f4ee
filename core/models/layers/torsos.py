"""Torsos (observations to features) and heads (features to action values) that models share."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from core.model import Model
from core.specs import EnvSpec

MakeLinear = Callable[[int, int], nn.Module]  # makes a layer of (inputs, outputs)


def image_shape(spec: EnvSpec) -> tuple[int, int, int]:
    """Return channels, height and width of the images that `scaled_image` makes of this environment's observations."""
    height, width = spec.frame.shape[:2]
    planes = spec.frame.shape[2] if len(spec.frame.shape) == 3 else 1
    return planes * max(spec.frame_stack, 1), height, width


def scaled_image(observation: Tensor, spec: EnvSpec) -> Tensor:
    """Convert stored observations [B, *observation_shape] to float32 [B, C, H, W] in 0 .. 1, channels_last."""
    if len(spec.frame.shape) == 3:  # colour or planes: channels stand last
        observation = observation.movedim(-1, -3)
    image = observation.reshape(observation.shape[0], *image_shape(spec))  # len() would be a constant in an export
    # Bytes are made contiguous before they become floats, because moving bytes is cheaper.
    return image.contiguous(memory_format=torch.channels_last).to(torch.float32).mul_(1.0 / spec.max_value)


def preprocess(model: Model, observation: Tensor) -> Tensor:
    """Convert stored observations [B, *observation_shape] to the floats that the model's torso reads."""
    return scaled_image(observation, model.spec) if model.observations == "image" else observation.float()


def num_features(layers: nn.Module, spec: EnvSpec) -> int:
    """Return the number of features that convolutions make of one image.

    Raises:
        ValueError: The images are too small for these convolutions.
    """
    shape = image_shape(spec)
    try:
        with torch.no_grad():
            features: Tensor = layers(torch.zeros(1, *shape))
    except RuntimeError as error:
        raise ValueError(f"pictures of {shape[1]}x{shape[2]} are too small for this network: {error}") from None
    return features.numel()


def convolutions(spec: EnvSpec, *layers: tuple[int, int, int], norm: str = "none") -> nn.Sequential:
    """Make convolutions of (planes, kernel, stride), each followed by a ReLU, and flatten the last output.

    If `norm` is "group", each convolution has GroupNorm(16) in place of a bias.
    """
    modules: list[nn.Module] = []
    inputs = image_shape(spec)[0]
    for planes, kernel, stride in layers:
        modules += [nn.Conv2d(inputs, planes, kernel, stride, bias=norm == "none")]
        modules += [nn.GroupNorm(16, planes)] if norm == "group" else []
        modules += [nn.ReLU(inplace=True)]
        inputs = planes
    return nn.Sequential(*modules, nn.Flatten())


def nature_convolutions(spec: EnvSpec, norm: str = "none") -> nn.Sequential:
    """Make the convolutions of Nature DQN (Mnih et al. 2015), for 84x84: 32 8x8/4, 64 4x4/2, 64 3x3/1."""
    return convolutions(spec, (32, 8, 4), (64, 4, 2), (64, 3, 1), norm=norm)


def small_convolutions(spec: EnvSpec, planes: int) -> nn.Sequential:
    """Make convolutions for 42x42, with 16 planes: 16 4x4/2, 32 4x4/2, 32 3x3/2.

    Their strides are those of the 2013 DQN network (1312.5602) on half its resolution, with one more convolution in
    place of its large hidden layer's input.
    """
    return convolutions(spec, (planes, 4, 2), (2 * planes, 4, 2), (2 * planes, 3, 2))


def minatar_convolutions(spec: EnvSpec, planes: int) -> nn.Sequential:
    """Make the convolution of the MinAtar networks (1903.03176, section 4), for 10x10: with 16 planes 16 3x3."""
    return convolutions(spec, (planes, 3, 1))


def image_torso(layers: nn.Sequential, spec: EnvSpec, hidden: int) -> nn.Sequential:
    """Add a fully connected layer with its ReLU to convolutions: images to features [B, hidden]."""
    return nn.Sequential(*layers, nn.Linear(num_features(layers, spec), hidden), nn.ReLU(inplace=True))


def vector_torso(spec: EnvSpec, hidden: int) -> nn.Sequential:
    """Make one hidden layer with its ReLU: vectors [B, *observation_shape] to features [B, hidden]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(spec.observation_shape), hidden), nn.ReLU())


class DuelingHead(nn.Module):
    """Q = V + A - mean A (1511.06581, eq. 9), with a hidden layer for each of V and A.

    A distribution is combined atom by atom (1710.02298, section 3).
    """

    def __init__(
        self, features: int, hidden: int, num_actions: int, linear: MakeLinear = nn.Linear, atoms: int | None = None
    ):
        super().__init__()
        self.value = _layers(features, hidden, 1, linear, atoms)
        self.advantage = _layers(features, hidden, num_actions, linear, atoms)

    def forward(self, features: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(features)  # [B, A] or [B, A, atoms]
        value: Tensor = self.value(features)  # after the advantage, because noisy layers draw in this order
        return value + advantage - advantage.mean(1, keepdim=True)


def q_head(
    features: int,
    hidden: int,
    num_actions: int,
    dueling: bool,
    linear: MakeLinear = nn.Linear,
    atoms: int | None = None,
) -> nn.Module:
    """Make a head from features [B, F] to action values [B, A], or with atoms to distributions [B, A, atoms].

    `linear` makes its fully connected layers.
    """
    if dueling:
        return DuelingHead(features, hidden, num_actions, linear, atoms)
    return _layers(features, hidden, num_actions, linear, atoms)


def _layers(features: int, hidden: int, outputs: int, linear: MakeLinear, atoms: int | None) -> nn.Sequential:
    layers = [linear(features, hidden), nn.ReLU(), linear(hidden, outputs * (atoms or 1))]
    return nn.Sequential(*layers, *([] if atoms is None else [nn.Unflatten(1, (outputs, atoms))]))
