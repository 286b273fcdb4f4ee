"""The model contract: observations in, what the agent's head names out, recurrent state passed through."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.common.tree import tree_map
from core.specs import EnvSpec
from core.types import State


@frozen_dataclass
class ModelParams:
    """Options of every model. `Model.Params` of each model is a subclass."""


class Model(nn.Module, ABC):
    """A network for one EnvSpec. `head` names what forward returns, so that agents and models are matched before a start."""

    Params: ClassVar[type[ModelParams]] = ModelParams
    head: ClassVar[str]             # "q": action values [B, A]; "recurrent-q": the same of Inputs; "distribution": [B, A, atoms];
                                    # "actor-critic": ActorCriticOutput; those of PolicyAndCritic
    observations: ClassVar[str]     # "image" or "vector"
    precision = "float32"           # of its networks' products (core/learning/precision.py)

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__()
        self.params, self.spec = params, spec

    def initial_state(self, batch_size: int) -> State:
        """The state at an episode's first observation."""
        return ()

    def networks(self) -> list[nn.Module]:
        """What agents call: each has a `forward`, and may have an `unroll`."""
        return [self]

    @abstractmethod
    def forward(self, observation: Any, state: State) -> tuple[Any, State]:
        """One step of B streams: observation [B, *observation_shape] in its stored dtype, or Inputs; the model scales it."""

    def unroll(self, observations: Any, firsts: Tensor, state: State) -> tuple[Any, State]:
        """T steps, [T, B, ...] to [T, B, ...]. Feed-forward models fold time into the batch; recurrent ones override and
        reset the state where firsts [T, B] is true."""
        length, batch_size = observations.shape[:2]
        output, state = self(observations.flatten(0, 1), state)
        return tree_map(lambda tensor: torch.unflatten(tensor, 0, (length, batch_size)), output), state


class Critics(nn.ModuleList):
    """Critics of the same, each with its own parameters and [B, N] of its own: [C, B, N]."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return torch.stack([critic(observation, action) for critic in self])


PerceptronLayers = list[tuple[Tensor, Tensor]]  # weight [outputs, inputs] and bias [outputs] of linear layers with ReLU between them


class PolicyAndCritic(Model):
    """Networks without a common parameter, for actions of A numbers in -1 .. 1. `critic` gives [C, B, N]: N numbers of each of C critics.

    - "policy-value": policy to actions [B, A], one critic of one value
    - "policy-distribution": one critic of N atoms' logits
    - "policy-twin-value": two critics of one value
    - "gaussian-twin-value": likewise, and policy to means and logarithms of deviations [B, 2 A], before tanh
    """

    policy: nn.Module  # of what `prepare` returns
    critic: Critics    # of that and actions [B, A] in -1 .. 1

    def networks(self) -> list[nn.Module]:
        return [self.policy, *self.critic]

    @abstractmethod
    def prepare(self, observation: Tensor) -> Tensor:
        """Stored observations [B, *observation_shape] as all networks, and their targets, take them: floats [B, ...]."""

    def observe(self, observation: Tensor, wanted: bool | Tensor = True) -> None:
        """See stored observations [B, *observation_shape] that were learnt from, if they are `wanted`: models that normalise keep their
        statistics in buffers."""

    def perceptrons(self) -> tuple[PerceptronLayers, list[PerceptronLayers]] | None:
        """The policy's layers, with tanh behind them, and each critic's, where that is all there is; None: there is more."""
        return None

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        """What the policy says."""
        return self.policy(self.prepare(observation)), state


class DataDependentModule(nn.Module):
    """A part that may look at values to take a shorter way, until `disable_host_sync`."""

    looks = True


def disable_host_sync(model: nn.Module) -> None:
    """From now on no part of it looks at a value: what it does depends on shapes alone, so that it can be recorded."""
    for part in model.modules():
        if isinstance(part, DataDependentModule):
            part.looks = False


def restart(state: State, first: np.ndarray | Tensor, initial: State) -> State:
    """The recurrent state with that of streams where an episode starts, `first` [B], replaced by the initial one."""
    if not state or not first.any():
        return state
    mask = torch.as_tensor(first, device=state[0].device)
    return tuple(torch.where(mask.view(-1, *[1] * (tensor.dim() - 1)), start, tensor) for tensor, start in zip(state, initial))
