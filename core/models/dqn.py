"""Action-value networks: a torso for each kind of observation, and a head that may be dueling and noisy."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.model import Model
from core.models.layers.noisy_linear import NoisyParams, linear_factory
from core.models.layers.torso_options import BTRTorso, MinAtarTorso, NatureTorso, SmallTorso, VectorTorso
from core.models.layers.torsos import num_features, preprocess, q_head
from core.specs import EnvSpec
from core.types import State


@frozen_dataclass
class QNetworkParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""


class QNetwork(Model):
    """A torso and a head with one hidden layer, to action values [B, A].

    If a subclass's output kind is "distribution", the head's output is [B, A, atoms].
    """

    Params: ClassVar[type] = QNetworkParams
    output_kind = "q"
    reads_vectors = True

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        norm = getattr(params, "norm", "none")  # not every torso has this option
        self.torso = params.layers(spec, norm)
        features = num_features(self.torso, spec) if self.observations == "image" else params.hidden
        atoms = params.atoms if self.output_kind == "distribution" else None
        num_actions = spec.action.num_actions  # type: ignore[union-attr]
        self.num_features = features
        self.q = q_head(features, params.hidden, num_actions, params.dueling, linear_factory(params), atoms, norm)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(preprocess(self, observation))), state


@frozen_dataclass
class LayerNormParams:
    norm: Literal["none", "layer"] = "none"
    """Normalisation: layer is LayerNorm after each hidden layer, of a convolution over its channels (PQN)."""


@frozen_dataclass
class NormedNatureTorso(NatureTorso):
    norm: Literal["none", "group", "layer"] = "none"
    """Normalisation: group is GroupNorm(16) in place of convolutions' biases; layer is LayerNorm as in PQN."""


@frozen_dataclass
class NormedSmallTorso(LayerNormParams, SmallTorso):
    pass


@frozen_dataclass
class NormedMinAtarTorso(LayerNormParams, MinAtarTorso):
    pass


@frozen_dataclass
class NormedVectorTorso(LayerNormParams, VectorTorso):
    pass


class DQNCNN(QNetwork, torso=NormedNatureTorso):
    """The Nature DQN network (Mnih et al. 2015) for 84x84, plain or normalised."""


class DQNResNet(QNetwork, torso=BTRTorso):
    """IMPALA's deep network as BTR widens, normalises and pools it (2411.03820), for images of any size."""


class DQNMinAtar(QNetwork, torso=NormedMinAtarTorso):
    """The network of the MinAtar paper (1903.03176, section 4) for 10x10."""


class DQNMLP(QNetwork, torso=NormedVectorTorso):
    """Two hidden layers for vectors; the first is never noisy."""


class DQNSmall(QNetwork, torso=NormedSmallTorso):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""
