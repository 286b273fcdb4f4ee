"""DDPG, deep deterministic policy gradient (1509.02971), with n-step returns, many actors and prioritised replay by settings.

Defaults and rows have the settings of its descendants (batch 256, one learning rate, Gaussian noise). Deviation: a truncated episode
bootstraps from its final observation.
"""

from torch import Tensor

from core.agents.base.continuous_control import ControlParams, CriticLosses, Step
from core.agents.base.deterministic_policy import Deterministic, PolicyLosses, value_losses


class DDPG(Deterministic):
    Params = ControlParams
    head = "policy-value"
    captures = True

    def critic_losses(self, step: Step, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        """Squared errors of Q(s, a) against R + D Q'(s_n, mu'(s_n)) (equations 4 and 5)."""
        values = outputs[0, :, 0]  # [B]
        errors = values - (step.returns + step.factors * bootstrap[0, :, 0])
        return CriticLosses(errors.square(), 2 * errors.detach()[None, :, None], errors.detach().abs(), values)

    def policy_losses(self, outputs: Tensor) -> PolicyLosses:
        return value_losses(outputs)
