"""Actor-critics of the action-value networks' convolutions: for Atari, for small pictures, for MinAtar.

Observations [B, *observation_shape] as they are stored; logits [B, A], value [B], features [B, F].
"""

from dataclasses import dataclass

from core.common.settings import setting
from core.env import EnvSpec
from core.models.actor_critic import ActorCritic, ActorCriticParams
from core.models.layers.torsos import convolutions, image_shape, image_torso, minatar_convolutions, nature_convolutions, small_convolutions


@dataclass(frozen=True)
class NatureACParams(ActorCriticParams):
    hidden: int = setting(512, low=1, high=8_192)  # Units of the fully connected layer.


class NatureAC(ActorCritic):
    """The Nature DQN network's torso (Mnih et al. 2015) for 84x84: convolutions 32 8x8/4, 64 4x4/2, 64 3x3/1; F = 512."""

    Params = NatureACParams
    observations = "image"

    def __init__(self, params: NatureACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(nature_convolutions(image_shape(spec)[0]), spec, params.hidden))


@dataclass(frozen=True)
class FeatureACParams(ActorCriticParams):
    hidden: int = setting(512, low=1, high=8_192)        # Units of the fully connected layer.
    feature_size: int = setting(128, low=1, high=8_192)  # Numbers that stand for a state where replay compares states.


class FeatureAC(ActorCritic):
    """The network of the V-trace platform that this framework replaces, for 84x84: convolutions 64 8x8/4, 64 4x4/2, 128 3x3/1.

    Its feature head makes the short vectors that elite and attentive replay compare. Policy and value read it, so it is trained; F = 128.
    """

    Params = FeatureACParams
    observations = "image"

    def __init__(self, params: FeatureACParams, spec: EnvSpec):
        layers = convolutions(image_shape(spec)[0], (64, 8, 4), (64, 4, 2), (128, 3, 1))
        super().__init__(params, spec, image_torso(layers, spec, params.hidden), params.feature_size)


@dataclass(frozen=True)
class SmallACParams(ActorCriticParams):
    planes: int = setting(16, low=1, high=1_024)   # Planes of the first convolution; the others have twice as many.
    hidden: int = setting(256, low=1, high=8_192)  # Units of the fully connected layer.


class SmallAC(ActorCritic):
    """For 42x42 (env.size 42) and machines without a GPU: convolutions 16 4x4/2, 32 4x4/2, 32 3x3/2, as DQNSmall; F = 256."""

    Params = SmallACParams
    observations = "image"

    def __init__(self, params: SmallACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(small_convolutions(image_shape(spec)[0], params.planes), spec, params.hidden))


@dataclass(frozen=True)
class MinAtarACParams(ActorCriticParams):
    planes: int = setting(16, low=1, high=1_024)   # Planes of the convolution.
    hidden: int = setting(128, low=1, high=8_192)  # Units of the fully connected layer.


class MinAtarAC(ActorCritic):
    """The MinAtar networks' torso (1903.03176, section 4) for 10x10: one convolution 16 3x3; F = 128."""

    Params = MinAtarACParams
    observations = "image"

    def __init__(self, params: MinAtarACParams, spec: EnvSpec):
        super().__init__(params, spec, image_torso(minatar_convolutions(image_shape(spec)[0], params.planes), spec, params.hidden))
