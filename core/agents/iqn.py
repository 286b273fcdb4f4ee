"""Implicit quantile networks (1806.06923): quantiles of returns at fractions that are drawn for each window.

- Dueling and noisy layers are options of its models, prioritised replay is a memory, Munchausen targets are options
  (M-IQN, 2007.14430).
- The target's action is the best by the mean of the same N' quantiles that the target consists of, or with `double_q`
  by the mean of N' quantiles of the online network. The paper draws K = 32 further fractions for that choice.
- Priorities are losses, as Rainbow's are. A new step has the largest priority seen.
- Deviation: a truncated episode bootstraps from its final observation.
"""

import torch
from pydantic import Field
from torch import Tensor

from core.agents.base.q_learning import MunchausenParams, QLearning, QLearningParams
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.learning.gradients import Loss
from core.model import Model
from core.ops.actions import mask_actions
from core.ops.distributional import implicit_quantile_loss
from core.ops.returns import munchausen_bonus, n_step_return, soft_bootstrap
from core.types import Batch, QuantileInputs, State, TimeStep


@frozen_dataclass
class IQNParams(MunchausenParams, QLearningParams):
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
    required_output = "implicit-quantiles"
    supports_cuda_graphs = True

    @classmethod
    def problems(cls, params: IQNParams) -> list[str]:
        return params.munchausen_problems()

    # acting -----------------------------------------------------------------------------------------------------------
    def values(self, timestep: TimeStep, state: State) -> tuple[Tensor, State]:
        quantiles, state = self.model(on_device(timestep.observation, self.device), state)  # [E, A, K]
        return quantiles.mean(2), state

    def greedy(self, output: Tensor, legal: Tensor | None = None) -> dict[str, Tensor]:
        return super().greedy(output.mean(2), legal)

    # learning ---------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        params, window = self.params, batch.window
        returns, discounts = (
            part.to(self.device) for part in n_step_return(window.rewards, window.discounts, window.lasts, params.gamma)
        )
        observations = window.observations.to(self.device, non_blocking=True)  # [2, B, ...]
        actions = window.actions[0].to(self.device)  # [B]
        legal, bootstrap_legal = self.legal_actions(window)
        with torch.no_grad():
            if params.munchausen_alpha:
                returns = returns + self._bonus(observations[0], actions, legal)
            bootstrap = self._bootstrap(observations[1], bootstrap_legal)
            target = returns[:, None] + discounts[:, None] * bootstrap  # [B, N']
        fractions = self._draw_fractions(len(actions), params.quantiles)
        quantiles = self.model(QuantileInputs(observations[0], fractions), ())[0]  # [B, A, N]
        losses = implicit_quantile_loss(_select_actions(quantiles, actions), fractions, target, params.kappa)  # [B]
        loss = (batch.weights.to(self.device) * losses).mean()
        return Loss(loss, {"q_mean": quantiles.detach().mean()}, losses.detach())

    def _bonus(self, observation: Tensor, actions: Tensor, legal: Tensor | None) -> Tensor:
        """Return Munchausen's addition [B] to the rewards of actions [B]."""
        params = self.params
        values = mask_actions(self._quantiles(self.target, observation).mean(2), legal)
        return munchausen_bonus(
            values, actions, params.munchausen_alpha, params.munchausen_temperature, params.munchausen_clip
        )

    def _bootstrap(self, observation: Tensor, legal: Tensor | None) -> Tensor:
        """Return the target network's quantiles [B, N'] of the best action, or of Munchausen's policy."""
        quantiles = self._quantiles(self.target, observation)  # [B, A, N']
        if self.params.munchausen_alpha:
            values = mask_actions(quantiles.mean(2), legal)
            return soft_bootstrap(values, quantiles, self.params.munchausen_temperature)
        chooser = self._quantiles(self.model, observation) if self.params.double_q else quantiles
        return _select_actions(quantiles, mask_actions(chooser.mean(2), legal).argmax(1))

    def _quantiles(self, model: Model, observation: Tensor) -> Tensor:
        """Return quantiles [B, A, N'] at drawn fractions."""
        fractions = self._draw_fractions(len(observation), self.params.target_quantiles)
        output: Tensor = model(QuantileInputs(observation, fractions), ())[0]
        return output

    def _draw_fractions(self, size: int, number: int) -> Tensor:
        return torch.rand(size, number, device=self.device)


def _select_actions(quantiles: Tensor, actions: Tensor) -> Tensor:
    """Return the quantiles [B, N] of actions [B] among [B, A, N]."""
    return quantiles.gather(1, actions[:, None, None].expand(-1, 1, quantiles.shape[2]))[:, 0]
