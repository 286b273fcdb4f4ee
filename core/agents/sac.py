"""SAC, soft actor-critic (1801.01290), with two critics and a temperature that is learnt (1812.05905).

The policy is a Gaussian squashed by tanh; it samples in training and takes the mean in evaluations, so there is no noise to add.
Deviation: a truncated episode bootstraps from its final observation.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from core.agents.base.continuous_control import ContinuousControl, ControlParams, CriticLosses, Step, twin_losses
from core.common.settings import frozen_dataclass
from core.learning.microbatches import Loss
from core.learning.optimizer import Optimizer
from core.ops.squashed_gaussian import squashed_gaussian

LOG_DEVIATIONS = -20.0, 2.0  # between which they are clipped, as in the authors' code


@frozen_dataclass
class SACParams(ControlParams):
    lr: float = Field(default=3e-4, gt=0, le=100)
    """Learning rate of policy and temperature at the start (SAC: 3e-4)."""
    critic_lr: float = Field(default=3e-4, gt=0, le=100)
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
    Params = SACParams
    head = "gaussian-twin-value"
    captures = True

    # the actor's side -------------------------------------------------------------------------------------------------
    def choose(self, output: Tensor, exploring: bool) -> Tensor:
        return self._sampled(output)[0] if exploring else output.chunk(2, 1)[0].tanh()

    def _sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, A] in -1 .. 1 at prepared observations, and the logarithm of their density [B]."""
        return self._sampled(self.model.policy(observation))

    def _sampled(self, output: Tensor) -> tuple[Tensor, Tensor]:
        means, logarithms = output.chunk(2, 1)
        return squashed_gaussian(means, logarithms.clamp(*LOG_DEVIATIONS).exp(), torch.randn_like(means))

    # the learner's side -----------------------------------------------------------------------------------------------
    @cached_property
    def log_temperature(self) -> nn.Parameter:
        return nn.Parameter(torch.tensor(self.params.temperature, device=self.device).log())

    @cached_property
    def temperature_optimizer(self) -> Optimizer:
        return Optimizer([self.log_temperature], replace(self.params, weight_decay=0.0), period=self.params.policy_period)

    @torch.no_grad()
    def bootstrap(self, step: Step) -> Tensor:
        """Q'(s_n, a) - temperature log pi(a | s_n) of an action that today's policy samples (1812.05905, equation 3)."""
        action, log_density = self._sample(step.next_observation)
        entropy = self.log_temperature.exp() * log_density
        return self.target.critic(step.next_observation, action) - entropy[:, None]

    def critic_losses(self, step: Step, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        return twin_losses(step, outputs, bootstrap)

    def improve(self, step: Step, wanted: bool | Tensor) -> tuple[dict[str, Tensor], bool | Tensor]:
        """mean temperature log pi(a | s) - min_c Q_c(s, a) (equation 7), then the temperature (equation 18)."""
        temperature = self.log_temperature.detach().exp()

        def differentiate(part: slice | None) -> Loss:
            observation = step.part(part).observation
            action, log_density = self._sample(observation)
            values = self.model.critic(observation, action)[:, :, 0].amin(0)  # [B]
            loss = (temperature * log_density - values).mean()
            self.gradients.differentiate_policy(loss, loss.new_empty(0))
            return Loss(loss.detach(), {"entropy": -log_density.detach().mean()})

        found = self.policy_optimizer.gradient_of(len(step.returns), differentiate)
        norm, stepped = self.policy_optimizer.apply(found.loss, wanted)
        if self.params.learn_temperature:
            self.temperature_optimizer.step(self.log_temperature * (found.statistics["entropy"] - self._target_entropy), stepped)
        return {"policy_loss": found.loss, "policy_grad_norm": norm, "temperature": temperature, **found.statistics}, stepped

    def plan(self, count: int) -> None:
        super().plan(count)
        self.temperature_optimizer.plan(count // self.params.policy_period)

    @property
    def _target_entropy(self) -> float:
        given = self.params.target_entropy
        return -float(self.spec.action.low.size) if given is None else given  # type: ignore[union-attr]

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_temperature": self.log_temperature.detach(),
                "temperature_optimizer": self.temperature_optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.params.learn_temperature:
            self.log_temperature.data.copy_(state["log_temperature"])
        self.temperature_optimizer.load_state_dict(state["temperature_optimizer"])
