"""The two networks of IMPALA (1802.01561, figure 3), for 84x84 images.

- They map stored observations [B, *observation_shape] to logits [B, A], value [B] and features [B, 256].
- Deviations, usual on Atari: no language input, no last action, no last reward; the LSTM (256 units in the paper's
  figure) is an option.
"""

from pydantic import Field

from core.common.settings import frozen_dataclass
from core.models.actor_critic import ActorCritic, ActorCriticNetworkParams
from core.models.layers.torsos import ResidualBlock, convolutions, image_torso, impala_resnet
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
        super().__init__(params, spec, image_torso(impala_resnet(spec), spec, params.hidden))
        for block in self.modules():
            if isinstance(block, ResidualBlock):
                block.outer.weight.data.div_(6)
