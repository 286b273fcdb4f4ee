"""Action values from small pictures (env.size 42), for machines without a GPU: a seventh of the Nature network's arithmetic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.common.settings import setting
from core.env import EnvSpec
from core.model import Model, State
from core.models.layers.noisy_linear import NoisyParams, linear_layers
from core.models.layers.torsos import image_shape, num_features, q_head, scaled_image, small_convolutions


@dataclass(frozen=True)
class DQNSmallParams(NoisyParams):
    dueling: bool = setting(False)                 # Split the head into value and advantages (1511.06581).
    planes: int = setting(16, low=1, high=1_024)   # Planes of the first convolution; the others have twice as many.
    hidden: int = setting(256, low=1, high=8_192)  # Units of the fully connected layer (of each stream when dueling).


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
