"""DDPG, deep deterministic policy gradient (1509.02971).

- N-step returns, many actors and prioritised replay are settings.
- Defaults and configs have the settings of its descendants (batch 256, one learning rate, Gaussian noise).
- Deviation: a truncated episode bootstraps from its final observation.
"""

from torch import Tensor

from core.agents.base.continuous_control import ContinuousControl, ControlAgentParams, CriticLosses
from core.learning.gradients import Loss
from core.types import TransitionBatch


class DDPG(ContinuousControl):
    """Deterministic policy gradients through one critic."""

    Params = ControlAgentParams
    supports_cuda_graphs = True
    required_output = "policy-value"

    def bootstrap(self, transitions: TransitionBatch) -> Tensor:
        observation = transitions.next_observation
        outputs: Tensor = self.target.critic(observation, self.target.policy(observation))
        return outputs

    def critic_losses(self, transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        """Compute squared errors of Q(s, a) against R + D Q'(s_n, mu'(s_n)) (equations 4 and 5)."""
        values = outputs[0, :, 0]  # [B]
        errors = values - (transitions.returns + transitions.bootstrap_discounts * bootstrap[0, :, 0])
        return CriticLosses(errors.square(), errors.detach().abs(), {"q_mean": values.mean()})

    def policy_losses(self, outputs: Tensor) -> Tensor:
        """Compute - Q(s, mu(s)) (equation 6), [B].

        Args:
            outputs: [B, N] of the first critic, for the policy's own actions.
        """
        return -outputs[:, 0]

    def policy_loss(self, transitions: TransitionBatch) -> Loss:
        observation = transitions.observation
        outputs = self.model.critic[0](observation, self.model.policy(observation))
        return Loss(self.policy_losses(outputs).mean(), {})
