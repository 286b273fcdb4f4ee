"""Actor-critic networks: a torso, an optional LSTM, an optional feature head, a policy and a value.

Weights are initialised orthogonally and biases by zero. The gain is sqrt 2 in torso and feature head, 0.01 in the
policy (so that first actions are close to uniform: 2006.05990, section 3.2) and 1 in the value;
core/models/layers/lstm.py initialises the LSTM.
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
    image_torso,
    minatar_convolutions,
    nature_convolutions,
    preprocess,
    small_convolutions,
)
from core.specs import EnvSpec
from core.types import ActorCriticOutput, State


@frozen_dataclass
class ActorCriticNetworkParams(ModelParams):
    lstm: int = Field(default=0, ge=0, le=4_096)
    """Units of an LSTM behind the torso (IMPALA: 256); 0 is none."""


class ActorCritic(Model):
    """Torso [B, hidden], LSTM [B, lstm], feature head [B, feature_size], logits [B, A] and value [B].

    Subclasses make the torso, whose output has the length `params.hidden`. `feature_size` is the length of
    ActorCriticOutput.features: the feature head's, or without one the LSTM's, or without one the torso's.
    """

    output_kind = "actor-critic"

    def __init__(self, params: Any, spec: EnvSpec, torso: nn.Module, feature_size: int = 0):
        super().__init__(params, spec)
        width = params.lstm or params.hidden
        self.feature_size = feature_size or width
        self.torso = torso
        self.core = LSTMCore(params.hidden, params.lstm) if params.lstm else None
        head = [nn.Linear(width, feature_size), nn.ReLU(inplace=True)] if feature_size else []
        self.feature_head = nn.Sequential(*head) if head else nn.Identity()
        self.policy = nn.Linear(self.feature_size, spec.action.num_actions)  # type: ignore[union-attr]
        self.value = nn.Linear(self.feature_size, 1)
        root = math.sqrt(2)
        for module, gain in ((torso, root), (self.feature_head, root), (self.policy, 0.01), (self.value, 1.0)):
            _initialise(module, gain)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def initial_state(self, batch_size: int) -> State:
        return self.core.initial_state(batch_size) if self.core else ()

    def forward(self, observation: Tensor, state: State) -> tuple[ActorCriticOutput, State]:
        features = self.torso(preprocess(self, observation))
        if self.core:
            features, state = self.core.step(features, state)
        return self._output(features), state

    def unroll(self, observations: Tensor, firsts: Tensor, state: State) -> tuple[ActorCriticOutput, State]:
        if not self.core:
            return super().unroll(observations, firsts, state)
        features = self.torso(preprocess(self, observations.flatten(0, 1)))
        features, state = self.core(features.unflatten(0, observations.shape[:2]), firsts, state)  # [T, B, hidden]
        return self._output(features), state

    def _output(self, features: Tensor) -> ActorCriticOutput:
        features = self.feature_head(features)  # [..., feature_size]
        return ActorCriticOutput(self.policy(features), self.value(features).squeeze(-1), features)


def _initialise(module: nn.Module, gain: float) -> None:
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)


@frozen_dataclass
class NatureACParams(ActorCriticNetworkParams):
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer."""


class NatureAC(ActorCritic):
    """A network on the Nature DQN torso (Mnih et al. 2015) for 84x84; F = 512."""

    Params = NatureACParams
    observations = "image"

    def __init__(self, params: NatureACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(nature_convolutions(spec), spec, params.hidden))


@frozen_dataclass
class FeatureACParams(ActorCriticNetworkParams):
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer."""
    feature_size: int = Field(default=128, ge=1, le=8_192)
    """Numbers that stand for a state where replay compares states."""


class FeatureAC(ActorCritic):
    """The network of the V-trace platform that this framework replaces, for 84x84; F = 128.

    Its convolutions are 64 8x8/4, 64 4x4/2, 128 3x3/1. Its feature head makes the short vectors that elite and
    attentive replay compare; policy and value read these vectors, so the feature head is trained.
    """

    Params = FeatureACParams
    observations = "image"

    def __init__(self, params: FeatureACParams, spec: EnvSpec):
        layers = convolutions(spec, (64, 8, 4), (64, 4, 2), (128, 3, 1))
        super().__init__(params, spec, image_torso(layers, spec, params.hidden), params.feature_size)


@frozen_dataclass
class SmallACParams(ActorCriticNetworkParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of the fully connected layer."""


class SmallAC(ActorCritic):
    """A network for 42x42 (env.resolution 42) and machines without a GPU, on the torso of DQNSmall; F = 256."""

    Params = SmallACParams
    observations = "image"

    def __init__(self, params: SmallACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(small_convolutions(spec, params.planes), spec, params.hidden))


@frozen_dataclass
class MinAtarACParams(ActorCriticNetworkParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of the fully connected layer."""


class MinAtarAC(ActorCritic):
    """A network on the MinAtar networks' torso (1903.03176, section 4), for 10x10; F = 128."""

    Params = MinAtarACParams
    observations = "image"

    def __init__(self, params: MinAtarACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(minatar_convolutions(spec, params.planes), spec, params.hidden))


@frozen_dataclass
class MLPACParams(ActorCriticNetworkParams):
    hidden: int = Field(default=64, ge=1, le=8_192)
    """Units of each of the two hidden layers."""


class MLPAC(ActorCritic):
    """Two hidden layers of tanh for vectors, as in PPO (1707.06347) but shared by policy and value."""

    Params = MLPACParams
    observations = "vector"

    def __init__(self, params: MLPACParams, spec: EnvSpec):
        size, hidden = math.prod(spec.observation_shape), params.hidden
        layers = [nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()]
        super().__init__(params, spec, nn.Sequential(nn.Flatten(), *layers))
