"""Actor-critic networks: a torso, an optional LSTM, an optional feature head, a policy and a value.

- Weights are initialised orthogonally and biases by zero. The gain is sqrt 2 in torso and feature head, 0.01 in the
  policy (so that first actions are close to uniform: 2006.05990, section 3.2) and 1 in the value;
  core/models/layers/lstm.py initialises the LSTM.
- The policy's outputs are the parameters of core/ops/policy_distributions.py: logits of discrete actions (of several
  choices one after another), then means and logarithms of deviations of continuous ones. Deviations do not depend on
  the observation and start at 1 (1707.06347, section 6.1).
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Model, ModelParams, keep_float32
from core.models.layers.lstm import LSTMCore
from core.models.layers.running_normalization import RunningNormalization
from core.models.layers.torsos import (
    ImpalaDeepTorso,
    ImpalaTorso,
    MinAtarTorso,
    NatureTorso,
    ResidualBlock,
    SmallTorso,
    TorsoParams,
    convolutions,
    orthogonal_weights,
    torso_input,
)
from core.specs import Continuous, EnvSpec, Mixed
from core.types import ActorCriticOutput, State


@frozen_dataclass
class ActorCriticNetworkParams(ModelParams):
    lstm: int = Field(default=0, ge=0, le=4_096)
    """Units of an LSTM behind the torso (IMPALA: 256); 0 is none."""


class ActorCritic(Model):
    """Torso [B, hidden], LSTM [B, lstm], feature head [B, feature_size], parameters of a policy [B, P] and value [B].

    `feature_size` is the length of ActorCriticOutput.features: the feature head's, or without one the LSTM's, or
    without one the torso's. The torso is that of the options unless another is given. With a `value_torso`, the value
    reads its output in place of the features.
    """

    Params: ClassVar[type] = ActorCriticNetworkParams
    output_kind = "actor-critic"
    reads_vectors = True
    core_class: ClassVar[Any] = LSTMCore  # made of the numbers of its inputs and outputs

    def __init__(
        self,
        params: Any,
        spec: EnvSpec,
        torso: nn.Module | None = None,
        feature_size: int = 0,
        value_torso: nn.Module | None = None,
    ):
        super().__init__(params, spec)
        width = params.lstm or params.hidden
        self.feature_size = feature_size or width
        self.torso = torso or params.features(spec)
        self.core = self.core_class(params.hidden, params.lstm) if params.lstm else None
        head = (nn.Linear(width, feature_size), nn.ReLU(inplace=True)) if feature_size else ()
        self.feature_head = nn.Sequential(*head)
        self.policy, self.log_deviations = _policy(self.feature_size, spec)
        self.value_torso = value_torso
        self.value = nn.Linear(params.hidden if value_torso else self.feature_size, 1)
        root = math.sqrt(2)
        for module, gain in ((self.torso, root), (self.feature_head, root), (self.policy, 0.01), (self.value, 1.0)):
            orthogonal_weights(module, gain)
        if value_torso:
            orthogonal_weights(value_torso, root)
        keep_float32(self.policy), keep_float32(self.value)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def initial_state(self, batch_size: int) -> State:
        return self.core.initial_state(batch_size) if self.core else ()

    def forward(self, observation: Tensor, state: State) -> tuple[ActorCriticOutput, State]:
        inputs = self.preprocess(observation)
        features = self.torso(inputs)
        if self.core:
            features, state = self.core.step(features, state)
        return self.heads(features, inputs), state

    def unroll(self, observations: Tensor, firsts: Tensor, state: State) -> tuple[ActorCriticOutput, State]:
        if not self.core:
            return super().unroll(observations, firsts, state)
        features = self.torso(self.preprocess(observations.flatten(0, 1)))
        features, state = self.core(features.unflatten(0, observations.shape[:2]), firsts, state)  # [T, B, hidden]
        return self.heads(features), state

    def preprocess(self, observation: Tensor) -> Tensor:
        """Return stored observations [B, *observation_shape] as floats, the input of the torsos."""
        return torso_input(self, observation)

    def heads(self, features: Tensor, inputs: Tensor | None = None) -> ActorCriticOutput:
        """Compute the output from features of torso or LSTM. A subclass may change it, and return more fields.

        Args:
            features: [B, width] of one step, or [T, B, width] of an unroll with an LSTM.
            inputs: Preprocessed observations; None with an LSTM in an unroll.
        """
        features = self.feature_head(features)  # [..., feature_size]
        policy = self.policy(features)
        if self.log_deviations is not None:
            policy = torch.cat([policy, self.log_deviations.expand(*policy.shape[:-1], -1)], -1)
        value = self.value(self.value_torso(inputs) if self.value_torso else features)
        return ActorCriticOutput(policy, value.squeeze(-1), features)


def _policy(features: int, spec: EnvSpec) -> tuple[nn.Linear, nn.Parameter | None]:
    """Make the policy's layer and, for actions with numbers, logarithms of deviations [A]."""
    if not isinstance(spec.action, Continuous | Mixed):
        return nn.Linear(features, sum(spec.action.choice_sizes)), None
    logits = sum(spec.action.nvec) if isinstance(spec.action, Mixed) else 0
    numbers = spec.action.low.size
    return nn.Linear(features, logits + numbers), nn.Parameter(torch.zeros(numbers))


class NatureAC(ActorCritic, torso=NatureTorso):
    """A network on the Nature DQN torso (Mnih et al. 2015) for 84x84; F = 512."""


@frozen_dataclass
class FeatureTorso(TorsoParams):
    feature_size: int = Field(default=128, ge=1, le=8_192)
    """Length of the feature vectors by which replay compares states."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return convolutions(spec, (64, 8, 4), (64, 4, 2), (128, 3, 1))


class FeatureAC(ActorCritic, torso=FeatureTorso):
    """A network like that of the V-trace platform that this framework replaces, for 84x84; F = 128.

    Its convolutions are 64 8x8/4, 64 4x4/2, 128 3x3/1 (there 64 3x3/3, 64 3x3/2, 128 3x3/2). Its feature head makes the
    short vectors that elite and attentive replay compare. Policy and value read them, so the feature head is trained;
    there it was a side branch that no loss read.
    """

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec, feature_size=params.feature_size)


class SmallAC(ActorCritic, torso=SmallTorso):
    """A network for 42x42 (env.resolution 42) and machines without a GPU, on the torso of DQNSmall; F = 256."""


class MinAtarAC(ActorCritic, torso=MinAtarTorso):
    """A network on the MinAtar networks' torso (1903.03176, section 4), for 10x10; F = 128."""


@frozen_dataclass
class MLPACParams(ActorCriticNetworkParams):
    hidden: int = Field(default=64, ge=1, le=8_192)
    """Units of each of the two hidden layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Function of the hidden units."""
    log_std: float = Field(default=0.0, ge=-10, le=2)
    """Logarithm of the first standard deviations of continuous actions, in units where bounds are -1 and 1."""
    value_torso: bool = False
    """Give the value hidden layers of its own, as in PPO (1707.06347, section 6.1); an LSTM excludes it."""
    normalize_observations: bool = False
    """Normalise observations by mean and standard deviation of what was learnt from so far."""


class MLPAC(ActorCritic):
    """Two hidden layers for vectors, of tanh as in PPO (1707.06347, section 6.1), shared by policy and value or not."""

    Params = MLPACParams
    observations = "vector"

    def __init__(self, params: MLPACParams, spec: EnvSpec):
        if params.value_torso and params.lstm:
            raise ValueError(f"model.value_torso needs a network without memory, not model.lstm={params.lstm}")
        size = math.prod(spec.observation_shape)
        torsos = [_vector_torso(size, params) for _ in range(1 + params.value_torso)]
        super().__init__(params, spec, torsos[0], value_torso=torsos[1] if params.value_torso else None)
        if self.log_deviations is not None:
            self.log_deviations.data.fill_(params.log_std)
        self.normalization = RunningNormalization(size) if params.normalize_observations else None

    def preprocess(self, observation: Tensor) -> Tensor:
        vectors = super().preprocess(observation)
        return self.normalization(vectors.flatten(1)) if self.normalization else vectors

    def update_normalization(self, observation: Tensor) -> None:
        if self.normalization:
            self.normalization.update(observation)


def _vector_torso(size: int, params: MLPACParams) -> nn.Sequential:
    activation, hidden = {"tanh": nn.Tanh, "relu": nn.ReLU}[params.activation], params.hidden
    return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), activation(), nn.Linear(hidden, hidden), activation())


class ImpalaCNN(ActorCritic, torso=ImpalaTorso):
    """IMPALA's shallow network (1802.01561, figure 3, left), for 84x84: convolutions 16 8x8/4, 32 4x4/2; F = 256.

    Deviations of both networks, usual on Atari: no language input, no last action, no last reward; the LSTM (256 units
    in the paper's figure) is an option. All layers of the published code (scalable_agent) have a gain of 1. The weights
    here are larger in the torso and smaller in the policy. On Pong, the first gradient of this network's value is
    therefore three times as large, and little of the policy's reaches the torso.
    """


class ImpalaResNet(ActorCritic, torso=ImpalaDeepTorso):
    """IMPALA's deep network (1802.01561, figure 3, right): sections of 16, 32 and 32 planes, 15 convolutions.

    Each section halves the image, so the network takes any size. The outer convolution of a residual block starts at a
    sixth of its initial weights, because there are six blocks: features then start near 1, not at 6 to 16 (root mean
    square).
    """

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__(params, spec)
        for block in self.modules():
            if isinstance(block, ResidualBlock):
                block.outer.weight.data.div_(6)
