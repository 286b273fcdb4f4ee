"""The Nature DQN network (Mnih et al. 2015), plain or with GroupNorm."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.env import EnvSpec
from core.model import Model, State
from core.models.torsos import image_shape, num_features, q_head, scaled_image
from core.settings import setting


@dataclass(frozen=True)
class DQNCNNParams:
    dueling: bool = setting(False)                                # 1511.06581
    norm: str = setting("none", choices=("none", "group"))        # group: GroupNorm(16) after each convolution, which then has no bias
    hidden: int = setting(512, low=1)                             # units of the fully connected layer (of each stream when dueling)


class DQNCNN(Model):
    """Convolutions 32 8x8/4, 64 4x4/2, 64 3x3/1, one hidden layer, action values [B, A]."""

    Params = DQNCNNParams
    head = "q"
    observations = "image"

    def __init__(self, params: DQNCNNParams, spec: EnvSpec):
        super().__init__(params, spec)
        shape = image_shape(spec)
        self.torso = nn.Sequential(*_convolution(shape[0], 32, 8, 4, params.norm), *_convolution(32, 64, 4, 2, params.norm),
                                   *_convolution(64, 64, 3, 1, params.norm), nn.Flatten())
        self.q = q_head(num_features(self.torso, shape), params.hidden, spec.action.num_actions, params.dueling)  # type: ignore[union-attr]
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(scaled_image(observation, self.spec))), state


def _convolution(planes_in: int, planes_out: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    if norm == "none":
        return [nn.Conv2d(planes_in, planes_out, kernel, stride), nn.ReLU(inplace=True)]
    return [nn.Conv2d(planes_in, planes_out, kernel, stride, bias=False), nn.GroupNorm(16, planes_out), nn.ReLU(inplace=True)]
