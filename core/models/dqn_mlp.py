"""Action values of vector observations: a plain multi-layer perceptron."""

from dataclasses import dataclass

from torch import Tensor

from core.common.settings import setting
from core.env import EnvSpec
from core.model import Model, State
from core.models.layers.noisy_linear import NoisyParams, linear_layers
from core.models.layers.torsos import q_head, vector_torso


@dataclass(frozen=True)
class DQNMLPParams(NoisyParams):
    dueling: bool = setting(False)                 # Split the head into value and advantages (1511.06581).
    hidden: int = setting(128, low=1, high=8_192)  # Units of each of the two hidden layers.


class DQNMLP(Model):
    Params = DQNMLPParams
    head = "q"
    observations = "vector"

    def __init__(self, params: DQNMLPParams, spec: EnvSpec):
        super().__init__(params, spec)
        self.torso = vector_torso(spec, params.hidden)
        self.q = q_head(params.hidden, params.hidden, spec.action.num_actions,  # type: ignore[union-attr]
                        params.dueling, linear_layers(params))

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.q(self.torso(observation.float())), state
