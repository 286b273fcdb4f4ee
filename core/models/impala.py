"""The two networks of IMPALA (1802.01561, figure 3), for 84x84 images.

- They map stored observations [B, *observation_shape] to logits [B, A], value [B] and features [B, 256].
- Deviations, usual on Atari: no language input, no last action, no last reward; the LSTM (256 units in the paper's
  figure) is an option.
"""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.models.actor_critic import ActorCritic, ActorCriticNetworkParams
from core.models.layers.torsos import convolutions, image_shape, image_torso
from core.specs import EnvSpec


@frozen_dataclass
class ImpalaNetworkParams(ActorCriticNetworkParams):
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of the fully connected layer."""


class ImpalaCNN(ActorCritic):
    """The shallow network (left in the figure): convolutions 16 8x8/4, 32 4x4/2."""

    Params = ImpalaNetworkParams
    observations = "image"

    def __init__(self, params: ImpalaNetworkParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(convolutions(spec, (16, 8, 4), (32, 4, 2)), spec, params.hidden))


class ImpalaResNet(ActorCritic):
    """The deep network (right in the figure): sections of 16, 32 and 32 planes, 15 convolutions.

    Each section halves the image, so the network takes any size. The outer convolution of a residual block starts at a
    sixth of its initial weights, because there are six blocks: features then start near 1, not at 6 to 16 (root mean
    square).
    """

    Params = ImpalaNetworkParams
    observations = "image"

    def __init__(self, params: ImpalaNetworkParams, spec: EnvSpec):
        layers = nn.Sequential(
            _section(image_shape(spec)[0], 16), _section(16, 32), _section(32, 32), nn.ReLU(inplace=True), nn.Flatten()
        )
        super().__init__(params, spec, image_torso(layers, spec, params.hidden))
        for block in self.modules():
            if isinstance(block, ResidualBlock):
                block.outer.weight.data.div_(6)


class ResidualBlock(nn.Module):
    """x + outer(relu(inner(relu(x)))), with 3x3 convolutions."""

    def __init__(self, planes: int):
        super().__init__()
        self.inner = nn.Conv2d(planes, planes, 3, padding=1)
        self.outer = nn.Conv2d(planes, planes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # Only the second ReLU may work in place, because the sum needs x as it was.
        residual: Tensor = self.outer(F.relu(self.inner(F.relu(x)), inplace=True))
        return x + residual


def _section(inputs: int, planes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, planes, 3, padding=1),
        nn.MaxPool2d(3, 2, padding=1),
        ResidualBlock(planes),
        ResidualBlock(planes),
    )
