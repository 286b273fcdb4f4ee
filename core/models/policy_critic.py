"""Policies and critics of continuous actions, for vectors and for pictures. Every network has layers of its own.

Hidden layers are drawn as nn.Linear does, which is uniform in +- 1 / sqrt(inputs), and the last layers of policy and critic in +- 3e-3, so
that first actions and values are close to zero (DDPG, 1509.02971, section 7). The action enters the critic with the observation's features,
not a layer later. As in the paper, policy and critic of pictures have convolutions of their own.
"""

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Critics, ModelParams, PerceptronLayers, PolicyAndCritic
from core.models.layers.running_normalization import RunningNormalization
from core.models.layers.torsos import image_shape, nature_convolutions, num_features, scaled_image
from core.specs import Continuous, EnvSpec

LAST_LAYER = 3e-3


@frozen_dataclass
class ControlParams(ModelParams):
    hidden: tuple[Annotated[int, Field(ge=1, le=8_192)], ...] = Field(default=(256, 256), strict=False)
    """Units of each hidden layer, of policy and critic alike (DDPG: 400 300)."""
    layer_norm: bool = False
    """Normalise each layer before its ReLU (1607.06450)."""


@frozen_dataclass
class ControlMLPParams(ControlParams):
    normalize_observations: bool = False
    """Normalise observations by the mean and deviation of what was learnt from so far."""


class Critic(nn.Module):
    """Prepared observations and actions [B, A] to `outputs` numbers each, [B, outputs]."""

    def __init__(self, torso: nn.Module, features: int, num_actions: int, params: ControlParams, outputs: int):
        super().__init__()
        self.torso, self.layers = torso, _perceptron(features + num_actions, params, outputs)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.layers(torch.cat([self.torso(observation), action], 1))


class ControlNetwork(PolicyAndCritic):
    """Subclasses say what a torso is; what follows it depends on the head."""

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        assert isinstance(spec.action, Continuous)
        num_actions, features = math.prod(spec.action.low.shape), self.torso()[1]
        last = [] if (gaussian := self.head == "gaussian-twin-value") else [nn.Tanh()]
        self.policy = nn.Sequential(self.torso()[0], _perceptron(features, params, num_actions * (1 + gaussian)), *last)
        outputs = params.atoms if self.head == "policy-distribution" else 1
        self.critic = Critics(Critic(self.torso()[0], features, num_actions, params, outputs) for _ in range(1 + ("twin" in self.head)))

    def torso(self) -> tuple[nn.Module, int]:
        """What makes features [B, F] of prepared observations, and F."""
        raise NotImplementedError


class MLPNetwork(ControlNetwork):
    """Vectors are their own features."""

    observations = "vector"

    def __init__(self, params: ControlMLPParams, spec: EnvSpec):
        super().__init__(params, spec)
        size = math.prod(spec.observation_shape)
        self.normalization = RunningNormalization(size) if params.normalize_observations else None

    def torso(self) -> tuple[nn.Module, int]:
        return nn.Identity(), math.prod(self.spec.observation_shape)

    def prepare(self, observation: Tensor) -> Tensor:
        vectors = observation.float().flatten(1)
        return self.normalization(vectors) if self.normalization else vectors

    def observe(self, observation: Tensor, wanted: bool | Tensor = True) -> None:
        if self.normalization:
            self.normalization.update(observation.to(self.normalization.mean.device).float().flatten(1), wanted)

    def perceptrons(self) -> tuple[PerceptronLayers, list[PerceptronLayers]] | None:
        if self.params.layer_norm or self.head == "gaussian-twin-value":
            return None
        return _linear(self.policy), [_linear(critic) for critic in self.critic]


class CNNNetwork(ControlNetwork):
    """The Nature DQN convolutions (Mnih et al. 2015), for 84x84."""

    observations = "image"

    def torso(self) -> tuple[nn.Module, int]:
        layers = nature_convolutions(image_shape(self.spec)[0])
        return layers, num_features(layers, image_shape(self.spec))

    def prepare(self, observation: Tensor) -> Tensor:
        return scaled_image(observation, self.spec)


def _perceptron(inputs: int, params: ControlParams, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in params.hidden:
        layers += [nn.Linear(inputs, units), *([nn.LayerNorm(units)] if params.layer_norm else []), nn.ReLU()]
        inputs = units
    last = nn.Linear(inputs, outputs)
    nn.init.uniform_(last.weight, -LAST_LAYER, LAST_LAYER)
    nn.init.uniform_(last.bias, -LAST_LAYER, LAST_LAYER)
    return nn.Sequential(*layers, last)


def _linear(part: nn.Module) -> PerceptronLayers:
    return [(layer.weight, layer.bias) for layer in part.modules() if isinstance(layer, nn.Linear)]


@frozen_dataclass
class D4PGMLPParams(ControlMLPParams):
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of the distribution (D4PG: 51)."""


@frozen_dataclass
class D4PGCNNParams(ControlParams):
    atoms: int = Field(default=51, ge=2, le=10_000)
    """Atoms of the distribution (D4PG: 51)."""


class D4PGMLP(MLPNetwork):
    Params, head = D4PGMLPParams, "policy-distribution"


class D4PGCNN(CNNNetwork):
    Params, head = D4PGCNNParams, "policy-distribution"


class DDPGMLP(MLPNetwork):
    Params, head = ControlMLPParams, "policy-value"


class DDPGCNN(CNNNetwork):
    Params, head = ControlParams, "policy-value"


class TD3MLP(MLPNetwork):
    Params, head = ControlMLPParams, "policy-twin-value"


class TD3CNN(CNNNetwork):
    Params, head = ControlParams, "policy-twin-value"


class SACMLP(MLPNetwork):
    Params, head = ControlMLPParams, "gaussian-twin-value"


class SACCNN(CNNNetwork):
    Params, head = ControlParams, "gaussian-twin-value"
