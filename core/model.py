"""The model contract: observations in, what the agent's head names out, recurrent state passed through."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from core.env import EnvSpec

State = tuple[Tensor, ...]  # recurrent state, each [B, ...]; empty for feed-forward models


class Model(nn.Module, ABC):
    """A network for one EnvSpec. `head` names what forward returns, so that agents and models are matched before a start."""

    Params: ClassVar[type]
    head: ClassVar[str]             # "q": action values [B, A]
    observations: ClassVar[str]     # "image" or "vector"

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__()
        self.params, self.spec = params, spec

    def initial_state(self, batch_size: int) -> State:
        """The state at an episode's first observation."""
        return ()

    @abstractmethod
    def forward(self, observation: Tensor, state: State) -> tuple[Any, State]:
        """One step of B streams: observation [B, *observation_shape] in its stored dtype; the model scales it."""

    def unroll(self, observations: Tensor, firsts: Tensor, state: State) -> tuple[Any, State]:
        """T steps, [T, B, ...] to [T, B, ...]. Feed-forward models fold time into the batch; recurrent ones override and
        reset the state where firsts [T, B] is true."""
        length, batch_size = observations.shape[:2]
        output, state = self(observations.flatten(0, 1), state)
        return torch.unflatten(output, 0, (length, batch_size)), state
