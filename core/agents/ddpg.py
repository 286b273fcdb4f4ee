"""DDPG, deep deterministic policy gradient (1509.02971).

- N-step returns, many actors and prioritised replay are settings.
- Defaults and configs have the settings of its descendants (batch 256, one learning rate, Gaussian noise).
- Deviation: a truncated episode bootstraps from its final observation.
"""

from torch import Tensor

from core.agents.base.continuous_control import ControlAgentParams, CriticLosses, Deterministic
from core.types import TransitionBatch


class DDPG(Deterministic):
    """Deterministic policy gradients through one critic."""

    Params = ControlAgentParams
    required_output = "policy-value"
    supports_cuda_graphs = True

    def critic_losses(self, transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        """Compute squared errors of Q(s, a) against R + D Q'(s_n, mu'(s_n)) (equations 4 and 5)."""
        values = outputs[0, :, 0]  # [B]
        errors = values - (transitions.returns + transitions.bootstrap_discounts * bootstrap[0, :, 0])
        return CriticLosses(errors.square(), errors.detach().abs(), values)

    def policy_losses(self, outputs: Tensor) -> Tensor:
        """Compute - Q(s, mu(s)) (equation 6)."""
        return -outputs[:, 0]
