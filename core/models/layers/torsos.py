"""Torsos (observations to features) and heads (features to action values) that models share.

Where frames hold a vector beside their picture, each torso of convolutions is a `PictureAndVectorTorso`.
"""

import math
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.device.recorded_work import is_recording
from core.model import Model, ModelParams, keep_float32
from core.models.layers.noisy_linear import NoisyLinear
from core.models.layers.spectral_norm import SpectralConv2d
from core.specs import EnvSpec
from core.types import PictureAndVector

VECTOR_UNITS = 64  # of the hidden layer that reads the vector beside a picture


def image_shape(spec: EnvSpec) -> tuple[int, int, int]:
    """Return channels, height and width of the images that `scaled_image` makes of this environment's observations."""
    height, width = spec.picture_shape[:2]
    planes = spec.picture_shape[2] if len(spec.picture_shape) == 3 else 1
    return planes * max(spec.frame_stack, 1), height, width


def scaled_image(observation: Tensor, spec: EnvSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert stored pictures, [B, *picture_shape] or with a stack [B, S, *picture_shape], to floats [B, C, H, W].

    They are in 0 .. 1 and channels_last. Pictures that were converted before are returned as they are.
    """
    if observation.dtype != getattr(torch, spec.frame.dtype):
        return observation
    if len(spec.picture_shape) == 3:  # colour or planes: channels stand last
        observation = observation.movedim(-1, -3)
    image = observation.reshape(observation.shape[0], *image_shape(spec))  # len() would be a constant in an export
    return _channels_last(image).to(dtype, copy=True).mul_(1.0 / spec.max_value)


def _channels_last(image: Tensor) -> Tensor:
    """Return images [B, C, H, W] in channels_last, bytes on a CPU by OpenCV, which is five times as fast as torch."""
    is_traced = is_recording() or torch.compiler.is_compiling()  # traces do not see what is not of torch
    if image.dtype != torch.uint8 or image.device.type != "cpu" or not image.is_contiguous() or is_traced:
        return image.contiguous(memory_format=torch.channels_last)
    import cv2  # takes long to import, and most networks need none of it

    batch, channels, height, width = image.shape
    planes = image.numpy().reshape(batch, channels, height * width)
    merged = cv2.merge([planes[:, channel] for channel in range(channels)])
    return torch.from_numpy(merged).view(batch, height, width, channels).movedim(-1, 1)


def torso_input(model: Model, observation: Tensor) -> Tensor:
    """Convert stored observations [B, *observation_shape] to what the model's torso reads.

    This is floats, or frames of a picture and a vector as they are, which `PictureAndVectorTorso` splits.
    """
    if model.observations != "image":
        return observation.float()
    return observation if model.spec.vector_size else scaled_image(observation, model.spec, model.image_dtype)


def num_features(layers: nn.Module, spec: EnvSpec) -> int:
    """Return the number of features that layers make of one observation.

    Raises:
        ValueError: The layers cannot read these observations; images may be too small for convolutions.
    """
    if not spec.is_image:
        with torch.no_grad():
            return int(layers(torch.zeros(1, *spec.observation_shape)).numel())
    shape = image_shape(spec)
    frames = torch.zeros(1, *spec.observation_shape, dtype=torch.uint8) if spec.vector_size else torch.zeros(1, *shape)
    try:
        with torch.no_grad():
            features: Tensor = layers(frames)
    except RuntimeError as error:
        if spec.vector_size and not any(isinstance(layer, PictureAndVectorTorso) for layer in layers.modules()):
            raise ValueError(
                "its torso reads no vector beside the picture: let `layers` return with_vector(..., spec) of "
                f"core/models/layers/torsos.py, or split the frames by split_frames there: {error}"
            ) from None
        raise ValueError(f"pictures of {shape[1]}x{shape[2]} are too small for this network: {error}") from None
    return features.numel()


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm of images [B, C, H, W] over the channels of each position."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class ChannelsLastGroupNorm(nn.GroupNorm):
    """GroupNorm of images in channels_last, which it keeps.

    Torch's own kernel for channels_last takes ten times as long on a CPU where a group has few channels.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.contiguous()).contiguous(memory_format=torch.channels_last)


def orthogonal_weights(module: nn.Module, gain: float) -> None:
    """Set weights of convolutions and linear layers to orthogonal ones (1312.6120) times `gain`, and biases to 0.

    With a gain of the root of 2, features differ between observations as much as their inputs do, whatever the depth.
    Torch's own weights leave two fifths of that to each layer with a ReLU.
    """
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def with_layer_norm(layer: nn.Linear | nn.Conv2d, norm: str) -> list[nn.Module]:
    """Return the layer and, if `norm` is "layer", LayerNorm of its outputs, over the channels of each position.

    The weights are then He normal and the biases 0, as in PQN's networks for pictures (2407.04811).
    """
    if norm != "layer":
        return [layer]
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    is_linear = isinstance(layer, nn.Linear)
    return [layer, nn.LayerNorm(layer.out_features) if is_linear else ChannelLayerNorm(layer.out_channels)]


class PictureAndVectorTorso(nn.Module):
    """Join the features of convolutions and those of a hidden layer of VECTOR_UNITS for the vector, [B, F].

    The inputs are frames [B, *observation_shape] that hold a picture and a vector, or a PictureAndVector.
    """

    def __init__(self, convolutions: nn.Sequential, spec: EnvSpec):
        super().__init__()
        self.spec, self.convolutions = spec, convolutions
        # Numbers of any size need more than the 8 bits of bfloat16.
        linear = keep_float32(nn.Linear(spec.vector_size * max(spec.frame_stack, 1), VECTOR_UNITS))
        self.vector = nn.Sequential(nn.Flatten(), linear, nn.ReLU())

    def forward(self, frames: Tensor | PictureAndVector) -> Tensor:
        picture, vector = split_frames(frames, self.spec) if isinstance(frames, Tensor) else frames
        features = self.convolutions(scaled_image(picture, self.spec))
        return torch.cat([features, self.vector(vector).to(features.dtype)], 1)


def split_frames(frames: Tensor, spec: EnvSpec) -> PictureAndVector:
    """Split frames [..., bytes] into their pictures and vectors."""
    size = math.prod(spec.picture_shape)
    # A copy, because floats must begin at a multiple of four bytes.
    vector = frames[..., size:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return PictureAndVector(frames[..., :size].unflatten(-1, spec.picture_shape), vector)


def with_vector(convolutions: nn.Sequential, spec: EnvSpec) -> nn.Sequential:
    """Return the convolutions, or with a vector beside the pictures a torso of both."""
    return nn.Sequential(PictureAndVectorTorso(convolutions, spec)) if spec.vector_size else convolutions


def convolutions(spec: EnvSpec, *layers: tuple[int, int, int], norm: str = "none") -> nn.Sequential:
    """Make convolutions of (planes, kernel, stride), each followed by a ReLU, and flatten the last output.

    If `norm` is "group", each convolution has GroupNorm(16) in place of a bias; if it is "layer", see
    `with_layer_norm`.
    """
    modules: list[nn.Module] = []
    inputs = image_shape(spec)[0]
    for planes, kernel, stride in layers:
        modules += with_layer_norm(nn.Conv2d(inputs, planes, kernel, stride, bias=norm != "group"), norm)
        modules += [ChannelsLastGroupNorm(16, planes)] if norm == "group" else []
        modules += [nn.ReLU(inplace=True)]
        inputs = planes
    # The last ReLU works on the flat tensor, because the gradient that it gets is laid out as that.
    return with_vector(nn.Sequential(*modules[:-1], nn.Flatten(), modules[-1]), spec)


def nature_convolutions(spec: EnvSpec, norm: str = "none") -> nn.Sequential:
    """Make the convolutions of Nature DQN (Mnih et al. 2015), for 84x84: 32 8x8/4, 64 4x4/2, 64 3x3/1."""
    return convolutions(spec, (32, 8, 4), (64, 4, 2), (64, 3, 1), norm=norm)


class ResidualBlock(nn.Module):
    """x + outer(relu(inner(relu(x)))), with 3x3 convolutions."""

    def __init__(self, planes: int, convolution: type[nn.Conv2d] = nn.Conv2d):
        super().__init__()
        self.inner = convolution(planes, planes, 3, padding=1)
        self.outer = convolution(planes, planes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # Only the second ReLU may work in place, because the sum needs x as it was.
        residual: Tensor = self.outer(F.relu(self.inner(F.relu(x)), inplace=True))
        return x + residual


def impala_resnet(spec: EnvSpec, width: int = 1, spectral_norm: bool = False, pool: int = 0) -> nn.Sequential:
    """Make the 15 convolutions of IMPALA's deep network (1802.01561, figure 3) and flatten their output.

    BTR (2411.03820) has twice the width, spectral normalisation of the residual blocks and a pool of 6.

    Args:
        spec: Environment, with images of any size.
        width: Factor of the planes, which are 16, 32 and 32 in its three sections. Each section halves the image.
        spectral_norm: Normalise the convolutions of the residual blocks.
        pool: Height and width to which adaptive max pooling brings the last planes; 0 is off.
    """
    block = SpectralConv2d if spectral_norm else nn.Conv2d
    modules: list[nn.Module] = []
    inputs = image_shape(spec)[0]
    for planes in (16 * width, 32 * width, 32 * width):
        section = [nn.Conv2d(inputs, planes, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        modules.append(nn.Sequential(*section, ResidualBlock(planes, block), ResidualBlock(planes, block)))
        inputs = planes
    pooling = [nn.AdaptiveMaxPool2d(pool)] if pool else []
    return with_vector(nn.Sequential(*modules, nn.ReLU(inplace=True), *pooling, nn.Flatten()), spec)


class DuelingHead(nn.Module):
    """Q = V + A - mean A (1511.06581, eq. 9), where A has its actions in the dimension `actions_dim`.

    - A distribution is combined atom by atom (1710.02298, section 3).
    - The gradient that enters the torso is divided by the root of 2, because two streams send theirs (1511.06581,
      section 4.2).
    """

    def __init__(self, value: nn.Module, advantage: nn.Module, actions_dim: int):
        super().__init__()
        self.value, self.advantage, self._actions_dim = value, advantage, actions_dim

    def forward(self, features: Tensor) -> Tensor:
        if features.requires_grad and torch.is_grad_enabled():
            features = features.view_as(features)  # so that other readers of the same tensor keep their gradient
            features.register_hook(lambda gradient: gradient * math.sqrt(0.5))
        advantage: Tensor = self.advantage(features)  # [B, A] or [B, A, atoms]
        value: Tensor = self.value(features)  # after the advantage, because noisy layers draw in this order
        return value + advantage - advantage.mean(self._actions_dim, keepdim=True)


def q_head(features: int, num_actions: int, params: Any) -> nn.Module:
    """Make a head from features [..., F] to action values [..., A], or with atoms from [B, F] to [B, A, atoms].

    The options `dueling`, `noisy`, `hidden` and `atoms` of a network shape it. If `norm` is "layer", the hidden layer
    is normalised (`with_layer_norm`).
    """
    noisy = partial(NoisyLinear, sigma=params.sigma, noise_per_env=params.noise_per_env) if params.noisy else None
    linear, atoms = noisy or nn.Linear, getattr(params, "atoms", None)

    def layers(outputs: int) -> nn.Sequential:
        first = with_layer_norm(linear(features, params.hidden), params.norm)
        last = keep_float32(linear(params.hidden, outputs * (atoms or 1)))
        return nn.Sequential(*first, nn.ReLU(), last, *([] if atoms is None else [nn.Unflatten(1, (outputs, atoms))]))

    if params.dueling:
        return DuelingHead(layers(1), layers(num_actions), actions_dim=-1 if atoms is None else 1)
    return layers(num_actions)


@frozen_dataclass
class TorsoParams(ModelParams):
    """Options of a torso of convolutions."""

    observations: ClassVar[str] = "image"
    norm = "none"  # as `convolutions` takes it; an option of some subclasses
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        """Make the layers before the first that is fully connected: images to features [B, F]."""
        raise NotImplementedError

    def features(self, spec: EnvSpec) -> nn.Sequential:
        """Make the layers with one that is fully connected: observations to features [B, hidden]."""
        layers = self.layers(spec)
        return nn.Sequential(*layers, nn.Linear(num_features(layers, spec), self.hidden), nn.ReLU(inplace=True))


@frozen_dataclass
class NatureTorso(TorsoParams):
    """Nature DQN's (Mnih et al. 2015), for 84x84."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return nature_convolutions(spec, self.norm)


@frozen_dataclass
class SmallTorso(TorsoParams):
    """Convolutions for 42x42 and machines without a GPU: with 16 planes 16 4x4/2, 32 4x4/2, 32 3x3/2.

    Their strides are those of the 2013 DQN network (1312.5602) on half its resolution. One more convolution shrinks the
    input of the hidden layer.
    """

    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return convolutions(spec, (self.planes, 4, 2), (2 * self.planes, 4, 2), (2 * self.planes, 3, 2), norm=self.norm)


@frozen_dataclass
class MinAtarTorso(TorsoParams):
    """The MinAtar networks' convolution (1903.03176, section 4), for 10x10: with 16 planes 16 3x3."""

    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return convolutions(spec, (self.planes, 3, 1), norm=self.norm)


@frozen_dataclass
class BTRTorso(TorsoParams):
    """IMPALA's deep network as BTR widens, normalises and pools it (2411.03820), for images of any size."""

    width: int = Field(default=2, ge=1, le=64)
    """Factor of the planes of IMPALA's deep network (BTR: 2)."""
    spectral_norm: bool = True
    """Divide the convolutions of residual blocks by their largest singular value (BTR: yes)."""
    pool: int = Field(default=6, ge=0, le=256)
    """Height and width to which the last planes are brought by adaptive max pooling (BTR: 6); 0 is off."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return impala_resnet(spec, self.width, self.spectral_norm, self.pool)


@frozen_dataclass
class ImpalaTorso(TorsoParams):
    """IMPALA's shallow network (1802.01561, figure 3, left), for 84x84: 16 8x8/4, 32 4x4/2."""

    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return convolutions(spec, (16, 8, 4), (32, 4, 2))


@frozen_dataclass
class ImpalaDeepTorso(ImpalaTorso):
    """IMPALA's deep network (1802.01561, figure 3, right), for images of any size."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return impala_resnet(spec)


@frozen_dataclass
class VectorTorso(TorsoParams):
    """One hidden layer for vectors."""

    observations = "vector"
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        layer = nn.Linear(math.prod(spec.observation_shape), self.hidden)
        return nn.Sequential(nn.Flatten(), *with_layer_norm(layer, self.norm), nn.ReLU())

    def features(self, spec: EnvSpec) -> nn.Sequential:
        return self.layers(spec)
