"""Implicit quantile networks (1806.06923): quantiles of returns at fractions that are drawn for each window.

- Dueling and noisy layers are options of its models, prioritised replay is a memory, Munchausen targets are options
  (M-IQN, 2007.14430).
- The target's action is the best by the mean of the same N' quantiles that the target consists of. With `double_q` it
  is the best by N' quantiles of the online network. The paper draws K = 32 further fractions for that choice.
- Priorities are losses, as Rainbow's are. A new step has the largest priority seen.
- Deviation: a truncated episode bootstraps from its final observation.
"""

import torch
from pydantic import Field
from torch import Tensor

from core.agents.base.action_values import MunchausenParams, QLearning, select_actions
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.model import Model
from core.ops.distributional import implicit_quantile_loss
from core.types import Batch, QuantileInputs


@frozen_dataclass
class IQNParams(MunchausenParams):
    quantiles: int = Field(default=8, ge=1, le=10_000)
    """Fractions N drawn for the learnt quantiles of a window (IQN: 8, Dopamine: 64)."""
    target_quantiles: int = Field(default=8, ge=1, le=10_000)
    """Fractions N' drawn for the target of a window (IQN: 8, Dopamine: 64)."""
    kappa: float = Field(default=1.0, gt=0, le=1e6)
    """Error up to which the loss is squared; larger ones count linearly (IQN: 1)."""
    double_q: bool = False
    """Choose the bootstrap action with the online network and evaluate it with the target (IQN: no)."""
    learning_rate: float = Field(default=5e-5, gt=0, le=100)
    """Learning rate at the start (IQN: 5e-5)."""
    optimizer_eps: float = Field(default=0.01 / 32, gt=0, le=1)
    """Added to the root of Adam's second moment (IQN: 0.01 / 32); for RMSProp see rmsprop_eps_in_root."""


class IQN(QLearning):
    """Distributional Q-learning from quantiles [B, A, N] at sampled fractions."""

    Params = IQNParams
    supports_cuda_graphs = True
    required_output = "implicit-quantiles"

    # acting -----------------------------------------------------------------------------------------------------------
    def expected(self, output: Tensor) -> Tensor:
        return output.mean(2)  # of [E, A, K]

    # learning ---------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        params, (transitions, target_outputs, _) = self.params, self.inputs_and_target_outputs(batch)
        with torch.no_grad():
            bootstrap, returns = self.bootstrap(transitions, *target_outputs)  # [B, N'], [B]
        target = returns[:, None] + transitions.bootstrap_discounts[:, None] * bootstrap
        fractions = self._draw_fractions(len(batch.weights), params.quantiles)
        quantiles = self.model(QuantileInputs(transitions.observation, fractions), ())[0]  # [B, A, N]
        taken = select_actions(quantiles, transitions.action)
        losses = implicit_quantile_loss(taken, fractions, target, params.kappa)  # [B]
        loss = self.weighted_mean(losses, batch)
        return Loss(loss, {"q_mean": quantiles.mean()}, losses.detach())

    def output_of(self, model: Model, observation: Tensor) -> Tensor:
        """Compute a network's quantiles [B, A, N'] at drawn fractions."""
        fractions = self._draw_fractions(len(observation), self.params.target_quantiles)
        output: Tensor = model(QuantileInputs(observation, fractions), ())[0]
        return output

    def _draw_fractions(self, size: int, number: int) -> Tensor:
        return torch.rand(size, number, device=self.device)
