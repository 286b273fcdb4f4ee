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

from core.agents.base.action_values import MunchausenParams, QLearning, select_actions
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.ops.returns import bootstrap_position, n_step_return
from core.specs import ArraySpec
from core.types import Batch, Window, check_shapes


@frozen_dataclass
class DQNParams(MunchausenParams):
    loss: Literal["huber", "squared"] = "huber"
    """Loss of the temporal-difference error: Huber, or its square / 2."""


class DQN(QLearning):
    """Deep Q-learning of action values [B, A]."""

    Params = DQNParams
    supports_cuda_graphs = True
    required_output = "q"

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def extras(self) -> dict[str, ArraySpec]:
        return {"q_taken": ArraySpec((), "float32"), "q_max": ArraySpec((), "float32")}

    def initial_priorities(self, window: Window) -> np.ndarray:
        """Compute |td| from the actor's values, in which the actor's network replaces the target (Ape-X, section 3)."""
        steps = self.params.n_step + 1  # of a window that may be longer
        rewards, discounts, lasts = (field[:steps] for field in (window.rewards, window.discounts, window.lasts))
        returns, discounts = n_step_return(rewards, discounts, lasts, self.params.gamma)
        bootstrap = window.extras["q_max"].gather(0, bootstrap_position(lasts)[None])[0]  # [B]
        return (returns + discounts * bootstrap - window.extras["q_taken"][0]).abs().numpy()

    # learning ---------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        transitions, target_outputs, _ = self.inputs_and_target_outputs(batch)
        with torch.no_grad():
            bootstrap, returns = self.bootstrap(transitions, *target_outputs)  # [B], [B]
        targets = returns + transitions.bootstrap_discounts * bootstrap
        values = self.output_of(self.model, transitions.observation)  # [B, A]
        q_taken = select_actions(values, transitions.action)
        check_shapes("B", q_taken, targets)
        if self.params.loss == "huber":
            losses = F.huber_loss(q_taken, targets, reduction="none")  # [B]
        else:
            losses = 0.5 * (q_taken - targets).square()  # as Ape-X has it; its gradient is that of Huber within 1
        loss = self.weighted_mean(losses, batch)
        errors = (targets - q_taken.detach()).abs()
        return Loss(loss, {"q_mean": values.mean(), "td_error": errors.mean()}, errors)
