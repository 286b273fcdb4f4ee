"""DDPG, deep deterministic policy gradient (1509.02971), with n-step returns, many actors and prioritised replay by settings.

Defaults are those of its descendants (batch 256, one learning rate, Gaussian noise); rows have the paper's. Deviation: a truncated episode
bootstraps from its final observation.
"""

import torch
from torch import Tensor

from core.agents.control import ContinuousControl, ControlParams, CriticLosses, Step


class DDPG(ContinuousControl):
    Params = ControlParams
    head = "policy-value"

    def critic_losses(self, step: Step) -> CriticLosses:
        """Squared errors of Q(s, a) against R + D Q'(s_n, mu'(s_n)) (equations 4 and 5)."""
        with torch.no_grad():
            bootstrap = self.target.critic(step.next_observation, self.target.policy(step.next_observation))  # [B]
        values = self.model.critic(step.observation, step.action)
        errors = step.returns + step.factors * bootstrap - values
        return CriticLosses(errors.square(), errors.detach().abs(), values.detach())

    def policy_loss(self, observation: Tensor) -> Tensor:
        """- mean Q(s, mu(s)) (equation 6)."""
        return -self.model.critic(observation, self.model.policy(observation)).mean()
