"""Action-value networks: a torso for each kind of observation, and a head that may be dueling and noisy.

Rainbow's networks (1710.02298) are these with a distribution of returns for each action.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.model import Model
from core.models.layers.noisy_linear import NoisyParams
from core.models.layers.torsos import (
    BTRTorso,
    MinAtarTorso,
    NatureTorso,
    SmallTorso,
    VectorTorso,
    num_features,
    q_head,
    torso_input,
)
from core.specs import EnvSpec
from core.types import State


@frozen_dataclass
class QNetworkParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""


class QNetwork(Model):
    """A torso and a head with one hidden layer, to action values [B, A].

    If the options have `atoms`, the head's output is [B, A, atoms].
    """

    Params: ClassVar[type] = QNetworkParams
    output_kind = "q"
    reads_vectors = True

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        self.torso = params.layers(spec)
        self.num_features = num_features(self.torso, spec)
        self.q = q_head(self.num_features, spec.action.num_actions, params)  # type: ignore[union-attr]
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def preprocess(self, observation: Tensor) -> Tensor:
        # Pictures that are stored as floats could not be told from converted ones.
        return observation if observation.is_floating_point() else torso_input(self, observation)

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(torso_input(self, observation))), state


@frozen_dataclass
class LayerNormParams:
    norm: Literal["none", "layer"] = "none"
    """Normalisation: layer is LayerNorm after each hidden layer, of a convolution over its channels (PQN)."""


@frozen_dataclass
class NormedNatureTorso(NatureTorso):
    norm: Literal["none", "group", "layer"] = "none"
    """Normalisation: group is GroupNorm(16) in place of convolutions' biases; layer is LayerNorm as in PQN."""


class DQNCNN(QNetwork, torso=NormedNatureTorso):
    """The Nature DQN network (Mnih et al. 2015) for 84x84, plain or normalised."""


class DQNResNet(QNetwork, torso=BTRTorso):
    """IMPALA's deep network as BTR widens, normalises and pools it (2411.03820), for images of any size."""


class DQNMinAtar(QNetwork, torso=(LayerNormParams, MinAtarTorso)):
    """The network of the MinAtar paper (1903.03176, section 4) for 10x10."""


class DQNMLP(QNetwork, torso=(LayerNormParams, VectorTorso)):
    """Two hidden layers for vectors; the first is never noisy."""


class DQNSmall(QNetwork, torso=(LayerNormParams, SmallTorso)):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""


@frozen_dataclass
class RainbowNetworkParams(NoisyParams):
    noisy: bool = True
    """Explore by noise on the head's weights, in training only (1706.10295); let epsilon be 0 then."""
    dueling: bool = True
    """Split the head into value and advantages (1511.06581)."""
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of each distribution (C51: 51, QR-DQN: 200 quantiles)."""


class RainbowNetwork(QNetwork):
    """Numbers of a distribution of returns for each action [B, A, atoms], dueling and noisy by default.

    They are logits for C51 and values of quantiles for QR-DQN: the agent decides. Noise is on the head's layers, which
    are the fully connected ones of the paper's network.
    """

    Params, output_kind = RainbowNetworkParams, "distribution"


class RainbowCNN(RainbowNetwork, torso=NormedNatureTorso):
    """The network of the Rainbow paper, for 84x84."""


class RainbowResNet(RainbowNetwork, torso=BTRTorso):
    """A network on BTR's torso (2411.03820), for images of any size."""


class RainbowSmall(RainbowNetwork, torso=(LayerNormParams, SmallTorso)):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""


class RainbowMinAtar(RainbowNetwork, torso=(LayerNormParams, MinAtarTorso)):
    """A network on the MinAtar networks' torso, for 10x10."""


class RainbowMLP(RainbowNetwork, torso=(LayerNormParams, VectorTorso)):
    """A network for vectors: one hidden layer without noise replaces the convolutions."""
