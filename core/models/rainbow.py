"""Rainbow's networks (1710.02298): the DQN networks with a distribution of returns for each action.

- The outputs [B, A, atoms] are logits for C51 and values of quantiles for QR-DQN: the agent decides.
- Heads are dueling and noisy by default. Noise is on the head's layers, which are the fully connected ones of the
  paper's network.
"""

from pydantic import Field

from core.common.settings import frozen_dataclass
from core.models.dqn import NormedMinAtarTorso, NormedNatureTorso, NormedSmallTorso, NormedVectorTorso, QNetwork
from core.models.layers.noisy_linear import NoisyParams
from core.models.layers.torso_options import BTRTorso


@frozen_dataclass
class RainbowNetworkParams(NoisyParams):
    noisy: bool = True
    """Explore by noise on the head's weights, in training only (1706.10295); let epsilon be 0 then."""
    dueling: bool = True
    """Split the head into value and advantages (1511.06581)."""
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of each distribution (C51: 51, QR-DQN: 200 quantiles)."""


class RainbowNetwork(QNetwork):
    """Numbers of a distribution of returns for each action [B, A, atoms]."""

    Params, output_kind = RainbowNetworkParams, "distribution"


class RainbowCNN(RainbowNetwork, torso=NormedNatureTorso):
    """The paper's network, for 84x84."""


class RainbowResNet(RainbowNetwork, torso=BTRTorso):
    """A network on BTR's torso (2411.03820), for images of any size."""


class RainbowSmall(RainbowNetwork, torso=NormedSmallTorso):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""


class RainbowMinAtar(RainbowNetwork, torso=NormedMinAtarTorso):
    """A network on the MinAtar networks' torso, for 10x10."""


class RainbowMLP(RainbowNetwork, torso=NormedVectorTorso):
    """A network for vectors: one hidden layer without noise replaces the convolutions."""
