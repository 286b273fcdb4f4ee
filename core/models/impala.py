"""The two networks of IMPALA (1802.01561, figure 3), for 84x84 pictures.

Observations [B, *observation_shape] as they are stored; logits [B, A], value [B], features [B, 256]. Deviations: as usual on Atari there
is no language input, no last action and no last reward, and the LSTM (256 units in the paper's figure) is an option.
"""


import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.models.actor_critic import ActorCritic, ActorCriticParams
from core.models.layers.torsos import convolutions, image_shape, image_torso
from core.specs import EnvSpec


@frozen_dataclass
class ImpalaParams(ActorCriticParams):
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of the fully connected layer."""


class ImpalaCNN(ActorCritic):
    """Shallow (left): convolutions 16 8x8/4, 32 4x4/2."""

    Params = ImpalaParams
    observations = "image"

    def __init__(self, params: ImpalaParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(convolutions(image_shape(spec)[0], (16, 8, 4), (32, 4, 2)), spec, params.hidden))


class ImpalaResNet(ActorCritic):
    """Deep (right): sections of 16, 32 and 32 planes, 15 convolutions. Each section halves the picture, so it takes any size.

    A residual block's outer convolution starts at a sixth, for there are six blocks: features begin near 1, not 6 to 16 (root mean square).
    """

    Params = ImpalaParams
    observations = "image"

    def __init__(self, params: ImpalaParams, spec: EnvSpec):
        layers = nn.Sequential(_section(image_shape(spec)[0], 16), _section(16, 32), _section(32, 32),
                               nn.ReLU(inplace=True), nn.Flatten())
        super().__init__(params, spec, image_torso(layers, spec, params.hidden))
        for block in self.modules():
            if isinstance(block, ResidualBlock):
                block.outer.weight.data.div_(6)


class ResidualBlock(nn.Module):
    """x + outer(relu(inner(relu(x)))), both convolutions 3x3."""

    def __init__(self, planes: int):
        super().__init__()
        self.inner = nn.Conv2d(planes, planes, 3, padding=1)
        self.outer = nn.Conv2d(planes, planes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.relu(self.inner(F.relu(x)), inplace=True))  # the first ReLU must leave x as it is


def _section(planes_in: int, planes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(planes_in, planes, 3, padding=1), nn.MaxPool2d(3, 2, padding=1),
                         ResidualBlock(planes), ResidualBlock(planes))
