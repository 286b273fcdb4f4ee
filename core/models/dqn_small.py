"""Action values from small pictures, for machines without a GPU: a seventh of the Nature network's arithmetic.

Meant for 42x42 pictures (env.size 42): the strides of the 2013 DQN network (1312.5602) on half its resolution, one more
convolution in place of its large hidden layer's input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.env import EnvSpec
from core.model import Model, State
from core.models.torsos import image_shape, num_features, q_head, scaled_image
from core.settings import setting


@dataclass(frozen=True)
class DQNSmallParams:
    dueling: bool = setting(False)        # 1511.06581
    planes: int = setting(16, low=1)      # of the first convolution; the others have twice as many
    hidden: int = setting(256, low=1)     # units of the fully connected layer (of each stream when dueling)


class DQNSmall(Model):
    """Convolutions 16 4x4/2, 32 4x4/2, 32 3x3/2, one hidden layer, action values [B, A]."""

    Params = DQNSmallParams
    head = "q"
    observations = "image"

    def __init__(self, params: DQNSmallParams, spec: EnvSpec):
        super().__init__(params, spec)
        shape, planes = image_shape(spec), params.planes
        self.torso = nn.Sequential(nn.Conv2d(shape[0], planes, 4, 2), nn.ReLU(inplace=True),
                                   nn.Conv2d(planes, 2 * planes, 4, 2), nn.ReLU(inplace=True),
                                   nn.Conv2d(2 * planes, 2 * planes, 3, 2), nn.ReLU(inplace=True), nn.Flatten())
        self.q = q_head(num_features(self.torso, shape), params.hidden, spec.action.num_actions, params.dueling)  # type: ignore[union-attr]
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(scaled_image(observation, self.spec))), state
