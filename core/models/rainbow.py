"""Rainbow's networks (1710.02298): the DQN networks with a distribution of returns for each action.

- The outputs [B, A, atoms] are logits for C51 and values of quantiles for QR-DQN: the agent decides.
- Heads are dueling and noisy by default. Noise is on the head's layers, which are the fully connected ones of the
  paper's network.
"""

from pydantic import Field

from core.common.settings import frozen_dataclass
from core.models.dqn import (
    DQNCNN,
    DQNMLP,
    DQNCNNParams,
    DQNMinAtar,
    DQNMinAtarParams,
    DQNMLPParams,
    DQNResNet,
    DQNResNetParams,
    DQNSmall,
    DQNSmallParams,
)
from core.models.layers.noisy_linear import NoisyParams


@frozen_dataclass
class RainbowNetworkParams(NoisyParams):
    noisy: bool = True
    """Explore by noise on the head's weights, in training only (1706.10295); let epsilon be 0 then."""
    dueling: bool = True
    """Split the head into value and advantages (1511.06581)."""
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of each distribution (C51: 51, QR-DQN: 200 quantiles)."""


@frozen_dataclass
class RainbowCNNParams(RainbowNetworkParams, DQNCNNParams):
    pass


class RainbowCNN(DQNCNN):
    """The paper's network, for 84x84."""

    Params, output_kind = RainbowCNNParams, "distribution"


@frozen_dataclass
class RainbowResNetParams(RainbowNetworkParams, DQNResNetParams):
    pass


class RainbowResNet(DQNResNet):
    """A network on BTR's torso (2411.03820), for images of any size."""

    Params, output_kind = RainbowResNetParams, "distribution"


@frozen_dataclass
class RainbowSmallParams(RainbowNetworkParams, DQNSmallParams):
    pass


class RainbowSmall(DQNSmall):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""

    Params, output_kind = RainbowSmallParams, "distribution"


@frozen_dataclass
class RainbowMinAtarParams(RainbowNetworkParams, DQNMinAtarParams):
    pass


class RainbowMinAtar(DQNMinAtar):
    """A network on the MinAtar networks' torso, for 10x10."""

    Params, output_kind = RainbowMinAtarParams, "distribution"


@frozen_dataclass
class RainbowMLPParams(RainbowNetworkParams, DQNMLPParams):
    pass


class RainbowMLP(DQNMLP):
    """A network for vectors: one hidden layer without noise replaces the convolutions."""

    Params, output_kind = RainbowMLPParams, "distribution"
