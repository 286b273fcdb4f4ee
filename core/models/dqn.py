"""The Nature DQN network (Mnih et al. 2015), plain or with GroupNorm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.common.settings import setting
from core.env import EnvSpec
from core.model import Model, State
from core.models.layers.noisy_linear import NoisyParams, linear_layers
from core.models.layers.torsos import image_shape, nature_convolutions, num_features, q_head, scaled_image


@dataclass(frozen=True)
class DQNCNNParams(NoisyParams):
    dueling: bool = setting(False)  # Split the head into value and advantages (1511.06581).
    norm: str = setting("none", choices=("none", "group"))  # Normalisation: group is GroupNorm(16) after each convolution, which then has
                                                            # no bias.
    hidden: int = setting(512, low=1, high=8_192)  # Units of the fully connected layer (of each stream when dueling).


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
