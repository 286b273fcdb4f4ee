"""Policies and critics of continuous actions, for vectors and for images. Every network has layers of its own.

- Hidden layers are drawn as nn.Linear does, uniform in +- 1 / sqrt(inputs). The last layers of policy and critic are
  drawn in +- 3e-3, so that first actions and values are close to zero (DDPG, 1509.02971, section 7).
- The action enters the critic with the observation's features, not a layer later.
- Policy and critic of images have convolutions of their own, as in the paper.
"""

import math
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Critics, ModelParams, PolicyAndCritic, keep_float32
from core.models.layers.running_normalization import RunningNormalization
from core.models.layers.torsos import nature_convolutions, num_features, torso_input
from core.specs import Continuous, EnvSpec

LAST_LAYER = 3e-3


@frozen_dataclass
class ControlNetworkParams(ModelParams):
    hidden: tuple[Annotated[int, Field(ge=1, le=8_192)], ...] = Field(default=(256, 256), strict=False)
    """Units of each hidden layer, of policy and critic alike (DDPG: 400 300)."""
    layer_norm: bool = False
    """Normalise each layer before its ReLU (1607.06450)."""


@frozen_dataclass
class ControlMLPParams(ControlNetworkParams):
    normalize_observations: bool = False
    """Normalise observations by mean and standard deviation of what was learnt from so far."""


class Critic(nn.Module):
    """A torso and a perceptron, from preprocessed observations and actions [B, A] to [B, outputs]."""

    def __init__(self, torso: nn.Module, features: int, num_actions: int, params: ControlNetworkParams, outputs: int):
        super().__init__()
        self.torso, self.layers = torso, _perceptron(features + num_actions, params, outputs)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        outputs: Tensor = self.layers(torch.cat([self.torso(observation), action], 1))
        return outputs


class ControlNetwork(PolicyAndCritic):
    """A policy and critics, each with a torso of its own.

    Subclasses make the torso. Each critic has as many outputs as the option `atoms` says, else one.
    """

    gaussian: ClassVar[bool] = False  # the policy gives means, then deviations; else actions of -1 .. 1
    num_critics: ClassVar[int] = 1

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        assert isinstance(spec.action, Continuous)
        # The torso that only counts features draws weights too: without it seeded runs would start from other weights.
        num_actions, features = math.prod(spec.action.low.shape), num_features(self.torso(), spec)
        layers = [self.torso(), _perceptron(features, params, num_actions * (1 + self.gaussian))]
        self.policy = nn.Sequential(*layers, *([] if self.gaussian else [nn.Tanh()]))
        self.critic = Critics(
            Critic(self.torso(), features, num_actions, params, getattr(params, "atoms", 1))
            for _ in range(self.num_critics)
        )

    def torso(self) -> nn.Module:
        """Make a torso from preprocessed observations to features [B, F]."""
        raise NotImplementedError


class MLPNetwork(ControlNetwork):
    """Networks for vectors, which are their own features."""

    observations = "vector"

    def __init__(self, params: ControlMLPParams, spec: EnvSpec):
        super().__init__(params, spec)
        size = math.prod(spec.observation_shape)
        self.normalization = RunningNormalization(size) if params.normalize_observations else None

    def torso(self) -> nn.Module:
        return nn.Identity()

    def preprocess(self, observation: Tensor) -> Tensor:
        vectors = observation.float().flatten(1)
        return self.normalization(vectors) if self.normalization else vectors

    def update_normalization(self, observation: Tensor) -> None:
        if self.normalization:
            self.normalization.update(observation)


class CNNNetwork(ControlNetwork):
    """Networks on the Nature DQN convolutions (Mnih et al. 2015), for 84x84."""

    observations = "image"
    reads_vectors = True

    def torso(self) -> nn.Module:
        return nature_convolutions(self.spec)

    def preprocess(self, observation: Tensor) -> Tensor:
        return torso_input(self, observation)


def _perceptron(inputs: int, params: ControlNetworkParams, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in params.hidden:
        layers += [nn.Linear(inputs, units), *([nn.LayerNorm(units)] if params.layer_norm else []), nn.ReLU()]
        inputs = units
    last = nn.Linear(inputs, outputs)
    nn.init.uniform_(last.weight, -LAST_LAYER, LAST_LAYER)
    nn.init.uniform_(last.bias, -LAST_LAYER, LAST_LAYER)
    return nn.Sequential(*layers, keep_float32(last))


@frozen_dataclass
class D4PGMLPParams(ControlMLPParams):
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of the distribution (D4PG: 51)."""


@frozen_dataclass
class D4PGCNNParams(ControlNetworkParams):
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of the distribution (D4PG: 51)."""


class D4PGMLP(MLPNetwork):
    Params, output_kind = D4PGMLPParams, "policy-distribution"


class D4PGCNN(CNNNetwork):
    Params, output_kind = D4PGCNNParams, "policy-distribution"


class DDPGMLP(MLPNetwork):
    Params, output_kind = ControlMLPParams, "policy-value"


class DDPGCNN(CNNNetwork):
    Params, output_kind = ControlNetworkParams, "policy-value"


class TD3MLP(MLPNetwork):
    Params, output_kind, num_critics = ControlMLPParams, "policy-twin-value", 2


class TD3CNN(CNNNetwork):
    Params, output_kind, num_critics = ControlNetworkParams, "policy-twin-value", 2


class SACMLP(MLPNetwork):
    Params, output_kind, gaussian, num_critics = ControlMLPParams, "gaussian-twin-value", True, 2


class SACCNN(CNNNetwork):
    Params, output_kind, gaussian, num_critics = ControlNetworkParams, "gaussian-twin-value", True, 2
