"""Rainbow's networks (1710.02298): a distribution of returns for each action, dueling, with noisy layers; for Atari, small pictures,
MinAtar and vectors.

The numbers [B, A, atoms] are logits for C51 and values of quantiles for QR-DQN: the agent decides. Torsos are those of the DQN networks;
noise is on the head's layers, which are the fully connected ones of the paper's network.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Model
from core.models.layers.noisy_linear import NoisyParams, linear_layers
from core.models.layers.torsos import (
    image_shape,
    minatar_convolutions,
    nature_convolutions,
    num_features,
    q_head,
    scaled_image,
    small_convolutions,
    vector_torso,
)
from core.specs import EnvSpec
from core.types import State


@frozen_dataclass
class RainbowNetworkParams(NoisyParams):
    noisy: bool = True
    """Explore by noise on the head's weights, in training only (1706.10295); let epsilon be 0 then."""
    dueling: bool = True
    """Split the head into value and advantages (1511.06581)."""
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of each distribution (C51: 51, QR-DQN: 200 quantiles)."""


class RainbowNetwork(Model):
    """Torso [B, F] -> dueling head -> [B, A, atoms]. Subclasses make the torso."""

    head = "distribution"

    def __init__(self, params: Any, spec: EnvSpec, torso: nn.Module, features: int):
        super().__init__(params, spec)
        num_actions = spec.action.num_actions  # type: ignore[union-attr]
        self.torso = torso
        self.q = q_head(features, params.hidden, num_actions, params.dueling, linear_layers(params), params.atoms)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        image = self.observations == "image"
        return self.q(self.torso(scaled_image(observation, self.spec) if image else observation.float())), state


@frozen_dataclass
class RainbowCNNParams(RainbowNetworkParams):
    norm: Literal["none", "group"] = "none"
    """Normalisation: group is GroupNorm(16) after each convolution, which then has no bias."""
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of each stream's hidden layer."""


class RainbowCNN(RainbowNetwork):
    """The paper's, for 84x84: convolutions 32 8x8/4, 64 4x4/2, 64 3x3/1 (Mnih et al. 2015)."""

    Params = RainbowCNNParams
    observations = "image"

    def __init__(self, params: RainbowCNNParams, spec: EnvSpec):
        torso = nature_convolutions(image_shape(spec)[0], params.norm)
        super().__init__(params, spec, torso, num_features(torso, image_shape(spec)))


@frozen_dataclass
class RainbowSmallParams(RainbowNetworkParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of each stream's hidden layer."""


class RainbowSmall(RainbowNetwork):
    """For 42x42 (env.size 42) and machines without a GPU: convolutions 16 4x4/2, 32 4x4/2, 32 3x3/2, as DQNSmall."""

    Params = RainbowSmallParams
    observations = "image"

    def __init__(self, params: RainbowSmallParams, spec: EnvSpec):
        torso = small_convolutions(image_shape(spec)[0], params.planes)
        super().__init__(params, spec, torso, num_features(torso, image_shape(spec)))


@frozen_dataclass
class RainbowMinAtarParams(RainbowNetworkParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each stream's hidden layer."""


class RainbowMinAtar(RainbowNetwork):
    """The MinAtar networks' torso (1903.03176, section 4) for 10x10: one convolution 16 3x3."""

    Params = RainbowMinAtarParams
    observations = "image"

    def __init__(self, params: RainbowMinAtarParams, spec: EnvSpec):
        torso = minatar_convolutions(image_shape(spec)[0], params.planes)
        super().__init__(params, spec, torso, num_features(torso, image_shape(spec)))


@frozen_dataclass
class RainbowMLPParams(RainbowNetworkParams):
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each of the two hidden layers."""


class RainbowMLP(RainbowNetwork):
    """For vectors: one hidden layer without noise stands for the convolutions."""

    Params = RainbowMLPParams
    observations = "vector"

    def __init__(self, params: RainbowMLPParams, spec: EnvSpec):
        super().__init__(params, spec, vector_torso(spec, params.hidden), params.hidden)
