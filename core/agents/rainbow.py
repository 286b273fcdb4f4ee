"""Rainbow (1710.02298): double, n-step, prioritised, distributional Q-learning.

- Dueling and noisy layers are options of its models.
- The distribution is C51's (1707.06887) or, in its place, that of quantile regression (1710.10044).
- Prioritised replay is the memory `prioritized` with alpha 0.5. The priority of a new step is the largest one seen, as
  in the paper. Then it is the step's loss: KL(target || prediction) for C51, the quantile Huber loss for quantiles.
- Other code (Dopamine, dqn_zoo, Kaixhin/Rainbow) takes the cross entropy in place of KL. It is never below the target's
  entropy, so priorities differ less there, and importance weights are nearer to 1.
- Munchausen targets (2007.14430) are options of quantiles. C51's atoms cannot stand for a mixture over actions that the
  target would need, so both together are refused.
- Deviation: a truncated episode bootstraps from its final observation.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from core.agents.base.action_values import MunchausenParams, QLearning, select_actions
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.ops.distributional import categorical_mean, categorical_projection, kl_loss, quantile_huber_loss
from core.types import Batch


@frozen_dataclass
class RainbowParams(MunchausenParams):
    distribution: Literal["categorical", "quantile"] = "categorical"
    """Distribution that is learnt: C51 (categorical), or quantile regression."""
    v_min: float = Field(default=-10.0, ge=-1e9, le=1e9)
    """Lower end of the support of "categorical" (C51: -10, for clipped rewards)."""
    v_max: float = Field(default=10.0, ge=-1e9, le=1e9)
    """Upper end of the support of "categorical" (C51: 10, for clipped rewards)."""
    kappa: float = Field(default=1.0, gt=0, le=1e6)
    """Error up to which "quantile" is squared; larger ones count linearly (QR-DQN: 1)."""
    learning_rate: float = Field(default=6.25e-5, gt=0, le=100)
    """Learning rate at the start (Rainbow: 6.25e-5)."""
    target_update_period: int = Field(default=2_000, ge=1, le=10**9)
    """Updates between updates of the target (Rainbow: 2,000, which are 32 k frames)."""
    exploration_epsilon_start: float = Field(default=0.0, ge=0, le=1)
    """Share of random actions at first; 0, as noisy layers explore."""
    exploration_epsilon_end: float = Field(default=0.0, ge=0, le=1)
    """Share of random actions at the end of exploration "linear" (Rainbow without noisy layers: 0.01)."""


class Rainbow(QLearning):
    """Distributional Q-learning from model outputs [B, A, N]."""

    Params = RainbowParams
    supports_cuda_graphs = True
    required_output = "distribution"

    @classmethod
    def problems(cls, params: RainbowParams) -> list[str]:
        if params.distribution != "categorical":
            return super().problems(params)
        found = []
        if not params.v_min < params.v_max:
            found.append(f"agent.v_min={params.v_min} must be below agent.v_max={params.v_max}")
        if params.munchausen_alpha:
            found.append(
                f"agent.munchausen_alpha={params.munchausen_alpha} needs agent.distribution=quantile: the target of "
                "C51 (categorical) has no such bonus"
            )
        return found

    # acting -----------------------------------------------------------------------------------------------------------
    def expected(self, output: Tensor) -> Tensor:
        params = self.params  # the output [E, A, N] is N values of quantiles, or logits of N atoms
        if params.distribution == "quantile":
            return output.mean(-1)
        return categorical_mean(output, params.v_min, params.v_max)

    # learning ---------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        params, (transitions, target_outputs, _) = self.params, self.inputs_and_target_outputs(batch)
        with torch.no_grad():
            bootstrap, returns = self.bootstrap(transitions, *target_outputs)  # [B, N], [B]
        discounts = transitions.bootstrap_discounts
        output = self.output_of(self.model, transitions.observation)  # [B, A, N]
        taken = select_actions(output, transitions.action)
        if params.distribution == "quantile":
            target = returns[:, None] + discounts[:, None] * bootstrap
            losses = quantile_huber_loss(taken, target, params.kappa)  # [B]
        else:
            target = categorical_projection(bootstrap.softmax(1), returns, discounts, params.v_min, params.v_max)
            losses = kl_loss(taken, target)
        loss = self.weighted_mean(losses, batch)
        priorities = losses.detach().clamp(min=0)  # rounding may take a KL below 0
        return Loss(loss, {"q_mean": self.expected(output).mean()}, priorities)
