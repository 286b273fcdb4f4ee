"""Implicit quantile networks (1806.06923): the DQN networks, whose features are multiplied by a fraction's embedding.

    phi_j(tau) = relu(sum_{i<64} cos(pi i tau) w_ij + b_j),    Z_tau(x, a) = f(psi(x) * phi(tau))_a    (equation 4)

- psi is a DQN network's torso and f its head, which may be dueling and noisy.
- Quantiles of a plain observation are those to act by. In training they are at `acting_quantiles` uniform fractions, as
  in the paper. In evaluation they are at the middles of as many equal parts, so that evaluations and exported networks
  draw nothing.
"""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.models.dqn import LayerNormParams, NormedNatureTorso, QNetwork, QNetworkParams
from core.models.layers.torsos import BTRTorso, MinAtarTorso, SmallTorso, VectorTorso, torso_input
from core.ops.distributional import midpoints
from core.specs import EnvSpec
from core.types import QuantileInputs, State


@frozen_dataclass
class IQNNetworkParams(QNetworkParams):
    acting_quantiles: int = Field(default=32, ge=1, le=10_000)
    """Quantiles whose mean is the value of an action when the agent acts (IQN: K = 32)."""
    cosines: int = Field(default=64, ge=1, le=10_000)
    """Cosines of the embedding of a fraction (IQN: 64)."""


class CosineEmbedding(nn.Module):
    """Map fractions [B, N] to phi(tau) [B, N, F]."""

    def __init__(self, cosines: int, features: int):
        super().__init__()
        self.linear = nn.Linear(cosines, features)
        self.factors: Tensor
        self.register_buffer("factors", math.pi * torch.arange(cosines), persistent=False)

    def forward(self, fractions: Tensor) -> Tensor:
        return torch.relu(self.linear(torch.cos(fractions[..., None] * self.factors)))


class ImplicitQuantileNetwork(QNetwork):
    """Quantiles [B, A, N] of each action's return."""

    Params, output_kind = IQNNetworkParams, "implicit-quantiles"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        self.embedding = CosineEmbedding(params.cosines, self.num_features)

    def forward(self, inputs: Tensor | QuantileInputs, state: State = ()) -> tuple[Tensor, State]:
        observation = inputs.observation if isinstance(inputs, QuantileInputs) else inputs
        features = self.torso(torso_input(self, observation))  # [B, F]
        fractions = inputs.fractions if isinstance(inputs, QuantileInputs) else self._acting_fractions(features)
        quantiles: Tensor = self.q(features[:, None] * self.embedding(fractions))  # [B, N, A]
        return quantiles.transpose(1, 2), state

    def _acting_fractions(self, features: Tensor) -> Tensor:
        number, size = self.params.acting_quantiles, features.shape[0]
        if self.training:
            return torch.rand(size, number, device=features.device)
        return midpoints(number, self.embedding.factors).expand(size, number)


class IQNCNN(ImplicitQuantileNetwork, torso=NormedNatureTorso):
    """The paper's network, for 84x84."""


class IQNResNet(ImplicitQuantileNetwork, torso=BTRTorso):
    """BTR's network (2411.03820), for images of any size."""


class IQNSmall(ImplicitQuantileNetwork, torso=(LayerNormParams, SmallTorso)):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""


class IQNMinAtar(ImplicitQuantileNetwork, torso=(LayerNormParams, MinAtarTorso)):
    """A network on the MinAtar networks' torso, for 10x10."""


class IQNMLP(ImplicitQuantileNetwork, torso=(LayerNormParams, VectorTorso)):
    """A network for vectors: one hidden layer without noise replaces the convolutions."""
