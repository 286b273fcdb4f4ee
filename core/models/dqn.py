"""Action-value networks: a torso for each kind of observation, and a head that may be dueling and noisy."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Model
from core.models.layers.noisy_linear import NoisyParams, linear_factory
from core.models.layers.torsos import (
    impala_resnet,
    minatar_convolutions,
    nature_convolutions,
    num_features,
    preprocess,
    q_head,
    small_convolutions,
    vector_torso,
)
from core.specs import EnvSpec
from core.types import State


class QNetwork(Model):
    """A torso and a head with one hidden layer, to action values [B, A].

    Subclasses make the torso, and pass the normalisation of the head's hidden layer on. If a subclass's output kind is
    "distribution", the head's output is [B, A, atoms].
    """

    output_kind = "q"
    reads_vectors = True

    def __init__(self, params: Any, spec: EnvSpec, torso: nn.Module, norm: str = "none"):
        super().__init__(params, spec)
        self.torso = torso
        features = num_features(torso, spec) if self.observations == "image" else params.hidden
        atoms = params.atoms if self.output_kind == "distribution" else None
        num_actions = spec.action.num_actions  # type: ignore[union-attr]
        self.num_features = features
        self.q = q_head(features, params.hidden, num_actions, params.dueling, linear_factory(params), atoms, norm)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(preprocess(self, observation))), state


@frozen_dataclass
class DQNCNNParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    norm: Literal["none", "group", "layer"] = "none"
    """Normalisation: group is GroupNorm(16) in place of convolutions' biases; layer is LayerNorm as in PQN."""
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNCNN(QNetwork):
    """The Nature DQN network (Mnih et al. 2015) for 84x84, plain or with GroupNorm."""

    Params: ClassVar[type] = DQNCNNParams
    observations = "image"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec, nature_convolutions(spec, params.norm), params.norm)


@frozen_dataclass
class DQNResNetParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    width: int = Field(default=2, ge=1, le=64)
    """Factor of the planes of IMPALA's deep network (BTR: 2)."""
    spectral_norm: bool = True
    """Divide the convolutions of residual blocks by their largest singular value (BTR: yes)."""
    pool: int = Field(default=6, ge=0, le=256)
    """Height and width to which the last planes are brought by adaptive max pooling (BTR: 6); 0 is off."""
    hidden: int = Field(default=512, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNResNet(QNetwork):
    """IMPALA's deep network as BTR widens, normalises and pools it (2411.03820), for images of any size."""

    Params: ClassVar[type] = DQNResNetParams
    observations = "image"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec, impala_resnet(spec, params.width, params.spectral_norm, params.pool))


@frozen_dataclass
class DQNMinAtarParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    norm: Literal["none", "layer"] = "none"
    """Normalisation: layer is LayerNorm after each hidden layer, of a convolution over its channels (PQN)."""
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the convolution."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNMinAtar(QNetwork):
    """The network of the MinAtar paper (1903.03176, section 4) for 10x10."""

    Params: ClassVar[type] = DQNMinAtarParams
    observations = "image"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec, minatar_convolutions(spec, params.planes, params.norm), params.norm)


@frozen_dataclass
class DQNMLPParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    norm: Literal["none", "layer"] = "none"
    """Normalisation: layer is LayerNorm after each hidden layer (PQN)."""
    hidden: int = Field(default=128, ge=1, le=8_192)
    """Units of each of the two hidden layers."""


class DQNMLP(QNetwork):
    """Two hidden layers for vectors; the first is never noisy."""

    Params: ClassVar[type] = DQNMLPParams
    observations = "vector"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec, vector_torso(spec, params.hidden, params.norm), params.norm)


@frozen_dataclass
class DQNSmallParams(NoisyParams):
    dueling: bool = False
    """Split the head into value and advantages (1511.06581)."""
    norm: Literal["none", "layer"] = "none"
    """Normalisation: layer is LayerNorm after each hidden layer, of a convolution over its channels (PQN)."""
    planes: int = Field(default=16, ge=1, le=1_024)
    """Planes of the first convolution; the others have twice as many."""
    hidden: int = Field(default=256, ge=1, le=8_192)
    """Units of the fully connected layer (of each stream when dueling)."""


class DQNSmall(QNetwork):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""

    Params: ClassVar[type] = DQNSmallParams
    observations = "image"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec, small_convolutions(spec, params.planes, params.norm), params.norm)
