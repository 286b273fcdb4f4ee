"""The Nature DQN network (Mnih et al. 2015), plain or with GroupNorm."""


from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

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
class DQNCNNParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    norm: Literal["none", "group"] = "none"
    """Normalisation: group is GroupNorm(16) after each convolution, which then has no bias."""
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNCNN(Model):
    """Convolutions 32 8x8/4, 64 4x4/2, 64 3x3/1, one hidden layer, action values [B, A]."""

    Params = DQNCNNParams
    head = "q"
    observations = "image"

    def __init__(self, params: DQNCNNParams, spec: EnvSpec):
        super().__init__(params, spec)
        shape = image_shape(spec)
        self.torso = nature_convolutions(shape[0], params.norm)
        self.q = q_head(num_features(self.torso, shape), params.hidden, spec.action.num_actions,  # type: ignore[union-attr]
                        params.dueling, linear_layers(params))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(scaled_image(observation, self.spec))), state


@frozen_dataclass
class DQNMinAtarParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNMinAtar(Model):
    Params = DQNMinAtarParams
    head = "q"
    observations = "image"

    def __init__(self, params: DQNMinAtarParams, spec: EnvSpec):
        super().__init__(params, spec)
        shape = image_shape(spec)
        self.torso = minatar_convolutions(shape[0], params.planes)
        self.q = q_head(num_features(self.torso, shape), params.hidden, spec.action.num_actions,  # type: ignore[union-attr]
                        params.dueling, linear_layers(params))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(scaled_image(observation, self.spec))), state


@frozen_dataclass
class DQNMLPParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each of the two hidden layers."""


class DQNMLP(Model):
    Params = DQNMLPParams
    head = "q"
    observations = "vector"

    def __init__(self, params: DQNMLPParams, spec: EnvSpec):
        super().__init__(params, spec)
        self.torso = vector_torso(spec, params.hidden)
        self.q = q_head(params.hidden, params.hidden, spec.action.num_actions,  # type: ignore[union-attr]
                        params.dueling, linear_layers(params))

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(observation.float())), state


@frozen_dataclass
class DQNSmallParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNSmall(Model):
    """Convolutions 16 4x4/2, 32 4x4/2, 32 3x3/2, one hidden layer, action values [B, A]."""

    Params = DQNSmallParams
    head = "q"
    observations = "image"

    def __init__(self, params: DQNSmallParams, spec: EnvSpec):
        super().__init__(params, spec)
        shape = image_shape(spec)
        self.torso = small_convolutions(shape[0], params.planes)
        self.q = q_head(num_features(self.torso, shape), params.hidden, spec.action.num_actions,  # type: ignore[union-attr]
                        params.dueling, linear_layers(params))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(scaled_image(observation, self.spec))), state
