"""What every actor-critic shares: a torso, an LSTM if wanted, a feature head if wanted, a policy and a value.

Initialisation: orthogonal weights and zero biases, of gain sqrt 2 in torso and feature head, 0.01 in the policy (its first actions are
close to uniform: 2006.05990, section 3.2) and 1 in the value; the LSTM as core/models/layers/lstm.py says.
"""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Model, ModelParams
from core.models.layers.lstm import LSTMCore
from core.models.layers.torsos import (
    convolutions,
    image_shape,
    image_torso,
    minatar_convolutions,
    nature_convolutions,
    scaled_image,
    small_convolutions,
)
from core.specs import EnvSpec
from core.types import ActorCriticOutput, State


@frozen_dataclass
class ActorCriticParams(ModelParams):
    lstm: int = Field(default=0, ge=0, le=4_096)
    """Units of an LSTM behind the torso (IMPALA: 256); 0 is none."""


class ActorCritic(Model):
    """Torso [B, hidden] -> LSTM [B, lstm] -> feature head [B, feature_size] -> logits [B, A] and value [B].

    Subclasses make the torso, whose output has the length `params.hidden`. `feature_size` is that of ActorCriticOutput.features: the
    feature head's, or without one the LSTM's, or without one the torso's.
    """

    head = "actor-critic"

    def __init__(self, params: Any, spec: EnvSpec, torso: nn.Module, feature_size: int = 0):
        super().__init__(params, spec)
        width = params.lstm or params.hidden
        self.feature_size = feature_size or width
        self.torso = torso
        self.core = LSTMCore(params.hidden, params.lstm) if params.lstm else None
        self.feature_head = nn.Sequential(nn.Linear(width, feature_size), nn.ReLU(inplace=True)) if feature_size else nn.Identity()
        self.policy = nn.Linear(self.feature_size, spec.action.num_actions)  # type: ignore[union-attr]
        self.value = nn.Linear(self.feature_size, 1)
        for part, gain in ((torso, math.sqrt(2)), (self.feature_head, math.sqrt(2)), (self.policy, 0.01), (self.value, 1.0)):
            _initialise(part, gain)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def initial_state(self, batch_size: int) -> State:
        return self.core.initial_state(batch_size) if self.core else ()

    def forward(self, observation: Tensor, state: State) -> tuple[ActorCriticOutput, State]:
        features = self._encode(observation)
        if self.core:
            features, state = self.core.step(features, state)
        return self._decide(features), state

    def unroll(self, observations: Tensor, firsts: Tensor, state: State) -> tuple[ActorCriticOutput, State]:
        if not self.core:
            return super().unroll(observations, firsts, state)
        features = self._encode(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])  # [T, B, hidden]
        features, state = self.core(features, firsts, state)
        return self._decide(features), state

    def _encode(self, observation: Tensor) -> Tensor:
        image = self.observations == "image"
        return self.torso(scaled_image(observation, self.spec) if image else observation.float())

    def _decide(self, features: Tensor) -> ActorCriticOutput:
        features = self.feature_head(features)  # [..., feature_size]
        return ActorCriticOutput(self.policy(features), self.value(features).squeeze(-1), features)


def _initialise(part: nn.Module, gain: float) -> None:
    for layer in part.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)


@frozen_dataclass
class NatureACParams(ActorCriticParams):
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer."""


class NatureAC(ActorCritic):
    """The Nature DQN network's torso (Mnih et al. 2015) for 84x84: convolutions 32 8x8/4, 64 4x4/2, 64 3x3/1; F = 512."""

    Params = NatureACParams
    observations = "image"

    def __init__(self, params: NatureACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(nature_convolutions(image_shape(spec)[0]), spec, params.hidden))


@frozen_dataclass
class FeatureACParams(ActorCriticParams):
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer."""
    feature_size: int = Field(default=128, ge=1, le=8_192)
    """Numbers that stand for a state where replay compares states."""


class FeatureAC(ActorCritic):
    """The network of the V-trace platform that this framework replaces, for 84x84: convolutions 64 8x8/4, 64 4x4/2, 128 3x3/1.

    Its feature head makes the short vectors that elite and attentive replay compare. Policy and value read it, so it is trained; F = 128.
    """

    Params = FeatureACParams
    observations = "image"

    def __init__(self, params: FeatureACParams, spec: EnvSpec):
        layers = convolutions(image_shape(spec)[0], (64, 8, 4), (64, 4, 2), (128, 3, 1))
        super().__init__(params, spec, image_torso(layers, spec, params.hidden), params.feature_size)


@frozen_dataclass
class SmallACParams(ActorCriticParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of the fully connected layer."""


class SmallAC(ActorCritic):
    """For 42x42 (env.size 42) and machines without a GPU: convolutions 16 4x4/2, 32 4x4/2, 32 3x3/2, as DQNSmall; F = 256."""

    Params = SmallACParams
    observations = "image"

    def __init__(self, params: SmallACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(small_convolutions(image_shape(spec)[0], params.planes), spec, params.hidden))


@frozen_dataclass
class MinAtarACParams(ActorCriticParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of the fully connected layer."""


class MinAtarAC(ActorCritic):
    """The MinAtar networks' torso (1903.03176, section 4) for 10x10: one convolution 16 3x3; F = 128."""

    Params = MinAtarACParams
    observations = "image"

    def __init__(self, params: MinAtarACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(minatar_convolutions(image_shape(spec)[0], params.planes), spec, params.hidden))


@frozen_dataclass
class MLPACParams(ActorCriticParams):
    hidden: int = Field(default=64, ge=1, le=8_192)
    """Units of each of the two hidden layers."""


class MLPAC(ActorCritic):
    """Two hidden layers of tanh, as PPO's (1707.06347) but shared by both heads: [B, *observation_shape] to logits [B, A], value [B]."""

    Params = MLPACParams
    observations = "vector"

    def __init__(self, params: MLPACParams, spec: EnvSpec):
        size, hidden = math.prod(spec.observation_shape), params.hidden
        super().__init__(params, spec, nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.Tanh(),
                                                     nn.Linear(hidden, hidden), nn.Tanh()))
