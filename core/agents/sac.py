"""SAC, soft actor-critic (1801.01290), with two critics and a temperature that is learnt (1812.05905).

- The policy is a Gaussian squashed by tanh. Training samples it and evaluations take its mean, so no noise is added.
- Deviation: a truncated episode bootstraps from its final observation.
- If agent.n_step is above 1, the target contains the entropy of the last state only.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from core.agents.base.continuous_control import ContinuousControl, ControlAgentParams, CriticLosses, twin_losses
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer
from core.ops.policy_distributions import squashed_gaussian
from core.types import TransitionBatch

LOG_DEVIATIONS = -20.0, 2.0  # bounds to which they are clipped, as in the authors' code


@frozen_dataclass
class SACParams(ControlAgentParams):
    learning_rate: float = Field(default=3e-4, gt=0, le=100)
    """Learning rate of policy and temperature at the start (SAC: 3e-4)."""
    critic_learning_rate: float = Field(default=3e-4, gt=0, le=100)
    """Learning rate of the critics at the start (SAC: 3e-4)."""
    noise: Literal["gaussian", "ornstein-uhlenbeck", "none"] = "none"
    """Noise that is added to the policy's sample."""
    temperature: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the entropy at the start."""
    learn_temperature: bool = True
    """Adapt the weight of the entropy, so that the entropy becomes target_entropy."""
    target_entropy: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Nats of entropy aimed at, of actions in -1 .. 1; None is minus the number of their dimensions."""


class SAC(ContinuousControl):
    """Maximum-entropy actor-critic."""

    Params = SACParams
    supports_cuda_graphs = True
    required_output = "gaussian-twin-value"
    trained_options = {"temperature": "learn_temperature"}

    # acting -----------------------------------------------------------------------------------------------------------
    def sample_action(self, output: Tensor, exploring: bool) -> Tensor:
        return self._sample(output)[0] if exploring else output.chunk(2, 1)[0].tanh()

    def _sample(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions [B, A] in -1 .. 1 from the policy's output, with the logarithm of their density [B]."""
        means, log_deviations = output.chunk(2, 1)
        return squashed_gaussian(means, log_deviations.clamp(*LOG_DEVIATIONS).exp(), torch.randn_like(means))

    # learning ---------------------------------------------------------------------------------------------------------
    def init_learner(self) -> None:
        super().init_learner()
        params = self.params
        self.log_temperature = nn.Parameter(torch.tensor(params.temperature, device=self.device).log())
        self.temperature_optimizer = Optimizer(
            [self.log_temperature],
            replace(params, weight_decay=0.0),
            period=params.policy_update_period,
            run_progress=lambda: self.run_progress,
        )
        self.optimizers_of_policy_updates.append(self.temperature_optimizer)
        num_actions = self.spec.action.low.size  # type: ignore[union-attr]
        self._target_entropy = -float(num_actions) if params.target_entropy is None else params.target_entropy

    def bootstrap(self, transitions: TransitionBatch) -> Tensor:
        """Compute Q'(s_n, a) - temperature log pi(a | s_n) for an action of the current policy (1812.05905, eq. 3)."""
        action, log_density = self._sample(self.model.policy(transitions.next_observation))
        penalty = self.log_temperature.exp() * log_density
        outputs: Tensor = self.target.critic(transitions.next_observation, action)
        return outputs - penalty[:, None]

    def critic_losses(self, transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        return twin_losses(transitions, outputs, bootstrap)

    def policy_values(self, outputs: Tensor) -> Tensor:
        """Compute min_c Q_c(s, a) [B], which the policy maximises, from outputs [C, B, N] of the critics."""
        return outputs[:, :, 0].amin(0)

    def policy_loss(self, transitions: TransitionBatch) -> Loss:
        """Compute mean temperature log pi(a | s) - min_c Q_c(s, a) (equation 7)."""
        action, log_density = self._sample(self.model.policy(transitions.observation))
        values = self.policy_values(self.model.critic(transitions.observation, action))
        loss = (self.log_temperature.detach().exp() * log_density - values).mean()
        return Loss(loss, {"entropy": -log_density.detach().mean()})

    def update_policy(
        self, transitions: TransitionBatch, apply_if: bool | Tensor
    ) -> tuple[dict[str, Tensor], bool | Tensor]:
        """Take the policy's step, then adapt the temperature (equation 18).

        The loss is linear in the logarithm of the temperature, as in stable-baselines3 and the authors' first code. The
        equation is linear in the temperature itself.
        """
        temperature = self.log_temperature.detach().exp()  # of the policy's step
        statistics, applied = super().update_policy(transitions, apply_if)
        if self.params.learn_temperature:
            excess = statistics["entropy"] - self._target_entropy
            self.temperature_optimizer.step(self.log_temperature * excess, applied)
        elif not self.temperature_optimizer.is_planned:
            self.temperature_optimizer.skip(1)
        return {**statistics, "temperature": temperature}, applied

    # checkpoint -------------------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> dict[str, Any]:
        return {**super().checkpoint_parts(), "temperature_optimizer": self.temperature_optimizer}

    def state_dict(self) -> dict[str, Any]:
        learnt = {"log_temperature": self.log_temperature.detach()} if self.params.learn_temperature else {}
        return {**super().state_dict(), **learnt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.params.learn_temperature and "log_temperature" in state:  # else the adaptation begins here
            self.log_temperature.data.copy_(state["log_temperature"])
