"""Deep Q-learning, from Nature DQN to Ape-X by settings alone.

- Nature DQN (Mnih et al. 2015), double (1509.06461), dueling (1511.06581, an option of the models), n-step returns.
- Munchausen DQN (2007.14430) by its options; initial priorities know nothing of its bonus and entropy.
- Prioritised replay (1511.05952) is the memory `prioritized`; the epsilon ladder is Ape-X's (1803.00933).
- Deviations: a truncated episode bootstraps from its final observation; importance weights scale the loss of each
  window before the mean.
"""

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.agents.base.q_learning import MunchausenParams, QLearning, QLearningParams
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.ops.actions import mask_actions
from core.ops.returns import bootstrap_position, munchausen_bonus, n_step_return, soft_bootstrap
from core.specs import ArraySpec
from core.types import Batch, Window


def half_squared_loss(values: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Compute (value - target)^2 / 2, whose gradient is the error, as Ape-X has it and as the Huber loss within 1."""
    return 0.5 * F.mse_loss(values, targets, reduction=reduction)


LOSSES: dict[str, Any] = {"huber": F.huber_loss, "squared": half_squared_loss}


@frozen_dataclass
class DQNParams(MunchausenParams, QLearningParams):
    loss: Literal["huber", "squared"] = "huber"
    """Loss of the temporal-difference error: Huber, or its square / 2."""


class DQN(QLearning):
    """Deep Q-learning of action values [B, A]."""

    Params = DQNParams
    required_output = "q"
    supports_cuda_graphs = True

    @classmethod
    def problems(cls, params: DQNParams) -> list[str]:
        return params.munchausen_problems()

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def extras(self) -> dict[str, ArraySpec]:
        return {"q_taken": ArraySpec((), "float32"), "q_max": ArraySpec((), "float32")}

    def initial_priorities(self, window: Window) -> np.ndarray:
        """Compute |td| from the actor's values, in which the actor's network replaces the target (Ape-X, section 3)."""
        returns, discounts = n_step_return(window.rewards, window.discounts, window.lasts, self.params.gamma)
        bootstrap = window.extras["q_max"].gather(0, bootstrap_position(window.lasts)[None])[0]  # [B]
        return (returns + discounts * bootstrap - window.extras["q_taken"][0]).abs().numpy()

    # learning ---------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        params = self.params
        window = batch.window
        returns, discounts = n_step_return(window.rewards, window.discounts, window.lasts, params.gamma)
        observations = window.observations.to(self.device, non_blocking=True)  # [2, B, ...]
        actions = window.actions[0].to(self.device)  # [B]
        legal, bootstrap_legal = self.legal_actions(window)
        bootstrap = self._bootstrap(observations[1], bootstrap_legal)
        targets = returns.to(self.device) + discounts.to(self.device) * bootstrap  # [B]
        if params.munchausen_alpha:
            targets = targets + self._bonus(observations[0], actions, legal)
        values = self.model(observations[0], ())[0]  # [B, A]
        q_taken = values.gather(1, actions[:, None])[:, 0]  # [B]
        loss = (batch.weights.to(self.device) * LOSSES[params.loss](q_taken, targets, reduction="none")).mean()
        errors = (targets - q_taken.detach()).abs()
        return Loss(loss, {"q_mean": values.detach().mean(), "td_error": errors.mean()}, errors)

    @torch.no_grad()
    def _bootstrap(self, observation: Tensor, legal: Tensor | None) -> Tensor:
        """Return the value [B] of each window's final observation."""
        values = mask_actions(self.target(observation, ())[0], legal)  # [B, A]
        if self.params.munchausen_alpha:
            return soft_bootstrap(values, values, self.params.munchausen_temperature)
        if not self.params.double_q:
            return values.amax(1)
        chooser = mask_actions(self.model(observation, ())[0], legal)
        return values.gather(1, chooser.argmax(1, keepdim=True))[:, 0]

    @torch.no_grad()
    def _bonus(self, observation: Tensor, actions: Tensor, legal: Tensor | None) -> Tensor:
        """Return Munchausen's addition [B] to the rewards of actions [B]."""
        params = self.params
        return munchausen_bonus(
            mask_actions(self.target(observation, ())[0], legal),
            actions,
            params.munchausen_alpha,
            params.munchausen_temperature,
            params.munchausen_clip,
        )
