"""An actor-critic of vector observations: one multi-layer perceptron for policy and value."""

import math
from dataclasses import dataclass

from torch import nn

from core.common.settings import setting
from core.env import EnvSpec
from core.models.actor_critic import ActorCritic, ActorCriticParams


@dataclass(frozen=True)
class MLPACParams(ActorCriticParams):
    hidden: int = setting(64, low=1, high=8_192)  # Units of each of the two hidden layers.


class MLPAC(ActorCritic):
    """Two hidden layers of tanh, as PPO's (1707.06347) but shared by both heads: [B, *observation_shape] to logits [B, A], value [B]."""

    Params = MLPACParams
    observations = "vector"

    def __init__(self, params: MLPACParams, spec: EnvSpec):
        size, hidden = math.prod(spec.observation_shape), params.hidden
        super().__init__(params, spec, nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.Tanh(),
                                                     nn.Linear(hidden, hidden), nn.Tanh()))
