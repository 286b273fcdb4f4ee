"""Recurrent action-value networks (R2D2: Kapturowski et al. 2019, r1lyTjAqYX, section 2.3).

- They are for Atari, small images, MinAtar and vectors.
- A torso, an LSTM that also reads the last action (one-hot) and the last reward, and a head that is dueling by default.
- Deviation: the torso ends in DQN's fully connected layer. The paper's LSTM reads the convolutions.
- The torso's weights are orthogonal at first, so that features differ from picture to picture. With torch's own those
  of Pong differ by a thousandth of what the last action does, and the LSTM takes long to see the ball.
- The reward is squashed by tanh, as in Acme's networks: unclipped rewards of hundreds would saturate the LSTM's gates.
"""

import math
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.model import Model
from core.models.layers.lstm import LSTMCore
from core.models.layers.noisy_linear import NoisyParams
from core.models.layers.torsos import (
    BTRTorso,
    MinAtarTorso,
    NatureTorso,
    SmallTorso,
    VectorTorso,
    orthogonal_weights,
    q_head,
    torso_input,
)
from core.specs import EnvSpec
from core.types import OARInputs, State


@frozen_dataclass
class R2D2NetworkParams(NoisyParams):
    dueling: bool = True
    """Split the head into value and advantages (1511.06581)."""
    lstm: int = Field(default=512, ge=1, le=4_096)
    """Units of the LSTM."""


class R2D2Network(Model):
    """Torso [B, hidden], LSTM of its output, last action and last reward [B, lstm], head to action values [B, A]."""

    Params: ClassVar[type] = R2D2NetworkParams
    output_kind = "recurrent-q"
    reads_vectors = True
    core_class: ClassVar[Any] = LSTMCore  # made of the numbers of its inputs and outputs

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        num_actions = spec.action.num_actions  # type: ignore[union-attr]
        self.torso = params.features(spec)
        orthogonal_weights(self.torso, math.sqrt(2))
        self.core = self.core_class(params.hidden + num_actions + 1, params.lstm)
        self.q = q_head(params.lstm, num_actions, params)
        self._actions: Tensor
        self.register_buffer("_actions", torch.arange(num_actions), persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def initial_state(self, batch_size: int) -> State:
        state: State = self.core.initial_state(batch_size)
        return state

    def forward(self, observation: OARInputs, state: State) -> tuple[Tensor, State]:
        features, state = self.core.step(self._encode(observation), state)
        return self.q(features), state

    def unroll(self, observations: OARInputs, firsts: Tensor, state: State) -> tuple[Tensor, State]:
        sizes = observations.action.shape  # [T, B]
        inputs = OARInputs(*(field.flatten(0, 1) for field in observations))
        features, state = self.core(torch.unflatten(self._encode(inputs), 0, sizes), firsts, state)
        return torch.unflatten(self.q(features.flatten(0, 1)), 0, sizes), state

    def _encode(self, inputs: OARInputs) -> Tensor:
        """Compute the LSTM's inputs [B, hidden + A + 1]. An action of -1 becomes zeros."""
        features = self.torso(torso_input(self, inputs.observation))
        one_hot = torch.eq(inputs.action[:, None], self._actions)  # [B, A]
        return torch.cat([features, one_hot.to(features.dtype), inputs.reward[:, None].tanh()], 1)


class R2D2CNN(R2D2Network, torso=NatureTorso):
    """A network on the Nature DQN torso (Mnih et al. 2015) with a layer of 512, for 84x84."""


class R2D2ResNet(R2D2Network, torso=BTRTorso):
    """A network on BTR's torso (2411.03820), for images of any size."""


class R2D2Small(R2D2Network, torso=SmallTorso, lstm=256):
    """A network for 42x42 (env.resolution 42) and machines without a GPU."""


class R2D2MinAtar(R2D2Network, torso=MinAtarTorso, lstm=128):
    """A network on the MinAtar networks' torso (1903.03176, section 4), for 10x10."""


class R2D2MLP(R2D2Network, torso=VectorTorso, hidden=64, lstm=64):
    """A network for vectors, whose torso is one layer with its ReLU."""
