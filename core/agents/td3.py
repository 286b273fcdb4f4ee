"""TD3, twin delayed deep deterministic policy gradient (1802.09477): DDPG with three remedies for values that are too high.

The lower one of two critics is bootstrapped from, its action has clipped noise, and policy and targets move at every other update. As in
the paper the policy follows the first critic. Deviation: a truncated episode bootstraps from its final observation.
"""


import torch
from pydantic import Field
from torch import Tensor

from core.agents.base.continuous_control import ControlParams, CriticLosses, Step, twin_losses
from core.agents.base.deterministic_policy import Deterministic, PolicyLosses, value_losses
from core.common.settings import frozen_dataclass


@frozen_dataclass
class TD3Params(ControlParams):
    policy_period: int = Field(default=2, ge=1, le=10_000)
    """Updates of the critics for one of policy and targets (TD3: 2)."""
    smoothing_scale: float = Field(default=0.2, ge=0, le=1_000)
    """Deviation of the noise on the target's action, as a share of the range's half width (TD3: 0.2)."""
    smoothing_clip: float = Field(default=0.5, ge=0, le=1_000)
    """Largest size of the noise on the target's action (TD3: 0.5)."""


class TD3(Deterministic):
    Params = TD3Params
    head = "policy-twin-value"
    captures = True

    def smoothed(self, action: Tensor) -> Tensor:
        """Equation 14."""
        clip = self.params.smoothing_clip
        noise = (self.params.smoothing_scale * torch.randn_like(action)).clamp_(-clip, clip)
        return (action + noise).clamp_(-1, 1)

    def critic_losses(self, step: Step, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        return twin_losses(step, outputs, bootstrap)

    def policy_losses(self, outputs: Tensor) -> PolicyLosses:
        return value_losses(outputs)
