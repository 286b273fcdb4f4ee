"""What every actor-critic shares: a torso, an LSTM if wanted, a feature head if wanted, a policy and a value.

Initialisation: orthogonal weights and zero biases, of gain sqrt 2 in torso and feature head, 0.01 in the policy (its first actions are
close to uniform: 2006.05990, section 3.2) and 1 in the value; the LSTM as core/models/layers/lstm.py says.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.common.settings import setting
from core.env import EnvSpec
from core.model import ActorCriticOutput, Model, State
from core.models.layers.lstm import LSTMCore
from core.models.layers.torsos import scaled_image


@dataclass(frozen=True)
class ActorCriticParams:
    lstm: int = setting(0, low=0, high=4_096)  # Units of an LSTM behind the torso (IMPALA: 256); 0 is none.


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
