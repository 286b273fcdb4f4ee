"""Kinds of torsos: the options of each, and how it is made of them.

A class of models takes the options of one kind besides those of its family: `class DQNSmall(QNetwork,
torso=SmallTorso)`.
"""

from typing import ClassVar

from pydantic import Field
from torch import nn

from core.common.settings import frozen_dataclass
from core.model import ModelParams
from core.models.layers.torsos import convolutions, image_torso, impala_resnet, nature_convolutions, vector_torso
from core.specs import EnvSpec


@frozen_dataclass
class TorsoParams(ModelParams):
    """Options of a torso of convolutions."""

    observations: ClassVar[str] = "image"
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        """Make the layers before the first that is fully connected: images to features [B, F].

        Args:
            spec: Environment.
            norm: Normalisation, as in `core.models.layers.torsos.convolutions`.
        """
        raise NotImplementedError

    def features(self, spec: EnvSpec) -> nn.Sequential:
        """Make the layers with one that is fully connected: observations to features [B, hidden]."""
        return image_torso(self.layers(spec), spec, self.hidden)


@frozen_dataclass
class NatureTorso(TorsoParams):
    """Nature DQN's (Mnih et al. 2015), for 84x84."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return nature_convolutions(spec, norm)


@frozen_dataclass
class SmallTorso(TorsoParams):
    """Convolutions for 42x42 and machines without a GPU: with 16 planes 16 4x4/2, 32 4x4/2, 32 3x3/2.

    Their strides are those of the 2013 DQN network (1312.5602) on half its resolution, with one more convolution in
    place of its large hidden layer's input.
    """

    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return convolutions(spec, (self.planes, 4, 2), (2 * self.planes, 4, 2), (2 * self.planes, 3, 2), norm=norm)


@frozen_dataclass
class MinAtarTorso(TorsoParams):
    """The MinAtar networks' convolution (1903.03176, section 4), for 10x10: with 16 planes 16 3x3."""

    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return convolutions(spec, (self.planes, 3, 1), norm=norm)


@frozen_dataclass
class BTRTorso(TorsoParams):
    """IMPALA's deep network as BTR widens, normalises and pools it (2411.03820), for images of any size."""

    width: int = Field(default=2, ge=1, le=64)
    """Factor of the planes of IMPALA's deep network (BTR: 2)."""
    spectral_norm: bool = True
    """Divide the convolutions of residual blocks by their largest singular value (BTR: yes)."""
    pool: int = Field(default=6, ge=0, le=256)
    """Height and width to which the last planes are brought by adaptive max pooling (BTR: 6); 0 is off."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return impala_resnet(spec, self.width, self.spectral_norm, self.pool)


@frozen_dataclass
class ImpalaTorso(TorsoParams):
    """IMPALA's shallow network (1802.01561, figure 3, left), for 84x84: 16 8x8/4, 32 4x4/2."""

    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return convolutions(spec, (16, 8, 4), (32, 4, 2), norm=norm)


@frozen_dataclass
class ImpalaDeepTorso(ImpalaTorso):
    """IMPALA's deep network (1802.01561, figure 3, right), for images of any size."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return impala_resnet(spec)


@frozen_dataclass
class VectorTorso(TorsoParams):
    """One hidden layer for vectors."""

    observations = "vector"
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each fully connected hidden layer."""

    def layers(self, spec: EnvSpec, norm: str = "none") -> nn.Sequential:
        return vector_torso(spec, self.hidden, norm)

    def features(self, spec: EnvSpec) -> nn.Sequential:
        return self.layers(spec)
