"""The two networks of IMPALA (1802.01561, figure 3), for 84x84 images.

- They map stored observations [B, *observation_shape] to logits [B, A], value [B] and features [B, 256].
- Deviations, usual on Atari: no language input, no last action, no last reward; the LSTM (256 units in the paper's
  figure) is an option.
"""

from typing import Any

from core.models.actor_critic import ActorCritic
from core.models.layers.torso_options import ImpalaDeepTorso, ImpalaTorso
from core.models.layers.torsos import ResidualBlock
from core.specs import EnvSpec


class ImpalaCNN(ActorCritic, torso=ImpalaTorso):
    """The shallow network (left in the figure): convolutions 16 8x8/4, 32 4x4/2."""


class ImpalaResNet(ActorCritic, torso=ImpalaDeepTorso):
    """The deep network (right in the figure): sections of 16, 32 and 32 planes, 15 convolutions.

    Each section halves the image, so the network takes any size. The outer convolution of a residual block starts at a
    sixth of its initial weights, because there are six blocks: features then start near 1, not at 6 to 16 (root mean
    square).
    """

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        for block in self.modules():
            if isinstance(block, ResidualBlock):
                block.outer.weight.data.div_(6)
