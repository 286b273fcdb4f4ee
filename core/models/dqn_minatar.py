"""The MinAtar DQN network (1903.03176, section 4): one 3x3 convolution of 16 planes and a hidden layer of 128."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.common.settings import setting
from core.env import EnvSpec
from core.model import Model, State
from core.models.layers.noisy_linear import NoisyParams, linear_layers
from core.models.layers.torsos import image_shape, minatar_convolutions, num_features, q_head, scaled_image


@dataclass(frozen=True)
class DQNMinAtarParams(NoisyParams):
    dueling: bool = setting(False)                 # Split the head into value and advantages (1511.06581).
    planes: int = setting(16, low=1, high=1_024)   # Planes of the convolution.
    hidden: int = setting(128, low=1, high=8_192)  # Units of the fully connected layer (of each stream when dueling).


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
