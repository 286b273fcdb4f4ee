"""Deep Q-learning, from Nature DQN to Ape-X by settings alone.

Nature DQN (Mnih et al. 2015), double (1509.06461), dueling (1511.06581, an option of the models), n-step, prioritised replay (1511.05952:
take the memory `prioritized`) and the epsilon ladder of Ape-X (1803.00933). Deviations: a truncated episode bootstraps from its final
observation; importance weights scale the loss of each window before the mean.
"""

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.agents.base.q_learning import QLearning, QLearningParams
from core.common.settings import frozen_dataclass
from core.device.transfers import on_device
from core.learning.microbatches import Loss
from core.ops.returns import bootstrap_position, n_step_return
from core.specs import ArraySpec, WindowSpec
from core.types import Batch, State, TimeStep, Window

LOSSES: dict[str, Any] = {"huber": F.huber_loss, "squared": F.mse_loss}


@frozen_dataclass
class DQNParams(QLearningParams):
    loss: Literal["huber", "squared"] = "huber"
    """Loss of the temporal-difference error."""


class DQN(QLearning):
    Params = DQNParams
    head = "q"
    captures = True

    # what it stores and samples ---------------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec(self.params.nstep, (0, self.params.nstep))

    @property
    def extras(self) -> dict[str, ArraySpec]:
        return {"q_taken": ArraySpec((), "float32"), "q_max": ArraySpec((), "float32")}

    def initial_priorities(self, window: Window) -> np.ndarray:
        """|td| of the actor's own values: its network stands for the target (Ape-X, section 3)."""
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, self.params.gamma)
        bootstrap = window.extras["q_max"].gather(0, bootstrap_position(window.lasts)[None])[0]  # [B]
        return (returns + factors * bootstrap - window.extras["q_taken"][0]).abs().numpy()

    # the actor's side -------------------------------------------------------------------------------------------------
    def values(self, timestep: TimeStep, state: State) -> tuple[Tensor, State]:
        return self.model(on_device(timestep.observation, self.device), state)

    # the learner's side -----------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        params = self.params
        window = batch.window
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, params.gamma)
        observations = window.observations.to(self.device, non_blocking=True)  # [2, B, ...]
        target = returns.to(self.device) + factors.to(self.device) * self._bootstrap(observations[1])  # [B]
        values = self.model(observations[0], ())[0]  # [B, A]
        taken = values.gather(1, window.actions[0, :, None].to(self.device))[:, 0]  # [B]
        loss = (batch.weights.to(self.device) * LOSSES[params.loss](taken, target, reduction="none")).mean()
        errors = (target - taken.detach()).abs()
        return Loss(loss, {"q_mean": values.detach().mean(), "td_error": errors.mean()}, errors)

    @torch.no_grad()
    def _bootstrap(self, observation: Tensor) -> Tensor:
        """Value of each window's final observation [B]."""
        values = self.target(observation, ())[0]  # [B, A]
        if not self.params.double:
            return values.amax(1)
        return values.gather(1, self.model(observation, ())[0].argmax(1, keepdim=True))[:, 0]
