"""Rainbow's networks (1710.02298): the DQN networks with a distribution of returns for each action.

- The outputs [B, A, atoms] are logits for C51 and values of quantiles for QR-DQN: the agent decides.
- Heads are dueling and noisy by default. Noise is on the head's layers, which are the fully connected ones of the
  paper's network.
"""

from typing import Literal

from pydantic import Field

from core.common.settings import frozen_dataclass
from core.models.dqn import DQNCNN, DQNMLP, DQNMinAtar, DQNResNet, DQNResNetParams, DQNSmall
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
class RainbowCNNParams(RainbowNetworkParams):
    norm: Literal["none", "group"] = "none"
    """Normalisation: group is GroupNorm(16) after each convolution, which then has no bias."""
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of each stream's hidden layer."""


class RainbowCNN(DQNCNN):
    """The paper's network, for 84x84."""

    Params, output_kind = RainbowCNNParams, "distribution"


@frozen_dataclass
class RainbowResNetParams(RainbowNetworkParams, DQNResNetParams):
    noisy: bool = True
    """Explore by noise on the head's weights, in training only (1706.10295); let epsilon be 0 then."""
    dueling: bool = True
    """Split the head into value and advantages (1511.06581)."""


class RainbowResNet(DQNResNet):
    """A network on BTR's torso (2411.03820), for images of any size."""

    Params, output_kind = RainbowResNetParams, "distribution"


@frozen_dataclass
class RainbowSmallParams(RainbowNetworkParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of each stream's hidden layer."""


class RainbowSmall(DQNSmall):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""

    Params, output_kind = RainbowSmallParams, "distribution"


@frozen_dataclass
class RainbowMinAtarParams(RainbowNetworkParams):
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each stream's hidden layer."""


class RainbowMinAtar(DQNMinAtar):
    """A network on the MinAtar networks' torso, for 10x10."""

    Params, output_kind = RainbowMinAtarParams, "distribution"


@frozen_dataclass
class RainbowMLPParams(RainbowNetworkParams):
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each of the two hidden layers."""


class RainbowMLP(DQNMLP):
    """A network for vectors: one hidden layer without noise replaces the convolutions."""

    Params, output_kind = RainbowMLPParams, "distribution"
