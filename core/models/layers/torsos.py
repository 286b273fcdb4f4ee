"""Observations to features and features to action values: shared by the models."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from core.specs import EnvSpec

Linear = Callable[[int, int], nn.Module]  # makes a layer of (inputs, outputs)


def image_shape(spec: EnvSpec) -> tuple[int, int, int]:
    """Channels, height and width of what `scaled_image` makes of this environment's observations."""
    height, width = spec.frame.shape[:2]
    planes = spec.frame.shape[2] if len(spec.frame.shape) == 3 else 1
    return planes * max(spec.frame_stack, 1), height, width


def scaled_image(observation: Tensor, spec: EnvSpec) -> Tensor:
    """Stored observations [B, *observation_shape] as float32 [B, C, H, W] in 0 .. 1, channels_last in memory."""
    if len(spec.frame.shape) == 3:  # colour or planes: channels stand last
        observation = observation.movedim(-1, -3)
    image = observation.reshape(observation.shape[0], *image_shape(spec))  # len() would become a constant in an exported network
    return image.contiguous(memory_format=torch.channels_last).to(torch.float32).mul_(1.0 / spec.max_value)  # bytes move cheaper


def num_features(torso: nn.Module, shape: tuple[int, int, int]) -> int:
    """Length of the flattened output of a convolutional torso. Raises ValueError for pictures too small for it."""
    try:
        with torch.no_grad():
            return torso(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        raise ValueError(f"pictures of {shape[1]}x{shape[2]} are too small for this network: {error}") from None


def convolutions(planes_in: int, *layers: tuple[int, int, int], norm: str = "none") -> nn.Sequential:
    """Convolutions of (planes, kernel, stride), each with a ReLU, then flat. `norm` "group": GroupNorm(16) in place of a bias."""
    modules: list[nn.Module] = []
    for planes, kernel, stride in layers:
        modules += [nn.Conv2d(planes_in, planes, kernel, stride, bias=norm == "none")]
        modules += [nn.GroupNorm(16, planes)] if norm == "group" else []
        modules += [nn.ReLU(inplace=True)]
        planes_in = planes
    return nn.Sequential(*modules, nn.Flatten())


def nature_convolutions(planes_in: int, norm: str = "none") -> nn.Sequential:
    """Nature DQN (Mnih et al. 2015), for 84x84."""
    return convolutions(planes_in, (32, 8, 4), (64, 4, 2), (64, 3, 1), norm=norm)


def small_convolutions(planes_in: int, planes: int) -> nn.Sequential:
    """For 42x42: the strides of the 2013 DQN network (1312.5602) on half its resolution, one more convolution in place of its
    large hidden layer's input."""
    return convolutions(planes_in, (planes, 4, 2), (2 * planes, 4, 2), (2 * planes, 3, 2))


def minatar_convolutions(planes_in: int, planes: int) -> nn.Sequential:
    """MinAtar (1903.03176, section 4), for 10x10."""
    return convolutions(planes_in, (planes, 3, 1))


def image_torso(layers: nn.Sequential, spec: EnvSpec, hidden: int) -> nn.Sequential:
    """Convolutions that end flat, then a fully connected layer with its ReLU: images to features [B, hidden]."""
    return nn.Sequential(*layers, nn.Linear(num_features(layers, image_shape(spec)), hidden), nn.ReLU(inplace=True))


def vector_torso(spec: EnvSpec, hidden: int) -> nn.Sequential:
    """One hidden layer with its ReLU: vectors [B, *observation_shape] to features [B, hidden]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(spec.observation_shape), hidden), nn.ReLU())


class DuelingHead(nn.Module):
    """Q = V + A - mean A (1511.06581, eq. 9), each stream with its own hidden layer; with atoms, for each (1710.02298, section 3)."""

    def __init__(self, features: int, hidden: int, num_actions: int, linear: Linear = nn.Linear, atoms: int | None = None):
        super().__init__()
        self.value = _layers(features, hidden, 1, linear, atoms)
        self.advantage = _layers(features, hidden, num_actions, linear, atoms)

    def forward(self, features: Tensor) -> Tensor:
        advantage = self.advantage(features)  # [B, A] or [B, A, atoms]
        return self.value(features) + advantage - advantage.mean(1, keepdim=True)


def q_head(features: int, hidden: int, num_actions: int, dueling: bool, linear: Linear = nn.Linear, atoms: int | None = None) -> nn.Module:
    """Features [B, F] to action values [B, A], or with atoms to a distribution of each, [B, A, atoms]. `linear` makes the layers."""
    if dueling:
        return DuelingHead(features, hidden, num_actions, linear, atoms)
    return _layers(features, hidden, num_actions, linear, atoms)


def _layers(features: int, hidden: int, outputs: int, linear: Linear, atoms: int | None) -> nn.Sequential:
    layers = [linear(features, hidden), nn.ReLU(), linear(hidden, outputs * (atoms or 1))]
    return nn.Sequential(*layers, *([] if atoms is None else [nn.Unflatten(1, (outputs, atoms))]))
