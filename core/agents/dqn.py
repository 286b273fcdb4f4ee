"""Deep Q-learning, from Nature DQN to Ape-X by settings alone.

- Nature DQN (Mnih et al. 2015), double (1509.06461), dueling (1511.06581, an option of the models), n-step returns.
- Munchausen DQN (2007.14430) by its options; initial priorities know nothing of its bonus and entropy.
- Prioritised replay (1511.05952) is the memory `prioritized`; the epsilon ladder is Ape-X's (1803.00933).
- Deviations: a truncated episode bootstraps from its final observation; importance weights scale the loss of each
  window before the mean.
"""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.agents.base.action_values import MunchausenParams, QLearning
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.ops.actions import mask_actions
from core.ops.returns import bootstrap_position, n_step_return, soft_bootstrap
from core.specs import ArraySpec
from core.types import Batch, TransitionBatch, Window


@frozen_dataclass
class DQNParams(MunchausenParams):
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
        transitions, target_outputs, _ = self.precomputed(batch)  # outputs of the target network
        targets = self.targets(transitions, *target_outputs)  # [B]
        values = self.model(transitions.observation, ())[0]  # [B, A]
        q_taken = values.gather(1, transitions.action[:, None])[:, 0]  # [B]
        if self.params.loss == "huber":
            losses = F.huber_loss(q_taken, targets, reduction="none")  # [B]
        else:
            losses = 0.5 * (q_taken - targets).square()  # as Ape-X has it; its gradient is that of Huber within 1
        loss = (batch.weights.to(self.device) * losses).mean()
        errors = (targets - q_taken.detach()).abs()
        return Loss(loss, {"q_mean": values.detach().mean(), "td_error": errors.mean()}, errors)

    @torch.no_grad()
    def targets(self, transitions: TransitionBatch, next_values: Tensor, values: Tensor | None = None) -> Tensor:
        """Compute the targets R + D V(s_n) [B], V by double_q, or Munchausen's.

        Args:
            transitions: B transitions.
            next_values: [B, A] of the target network, for the next observations.
            values: [B, A] of the target network, for the observations; given for Munchausen's bonus.
        """
        params, legal = self.params, transitions.next_legal
        next_values = mask_actions(next_values, legal)
        if params.munchausen_alpha:
            bootstrap = soft_bootstrap(next_values, next_values, params.munchausen_temperature)
        elif params.double_q:
            chooser = mask_actions(self.model(transitions.next_observation, ())[0], legal)
            bootstrap = next_values.gather(1, chooser.argmax(1, keepdim=True))[:, 0]
        else:
            bootstrap = next_values.amax(1)
        targets = transitions.returns + transitions.bootstrap_discounts * bootstrap
        return targets if values is None else targets + self.munchausen_bonus(values, transitions)
