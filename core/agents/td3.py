"""TD3, twin delayed deep deterministic policy gradient (1802.09477): DDPG with three remedies for overestimated values.

- The target bootstraps from the lower of two critics, at an action with clipped noise; policy and targets move at every
  other update.
- The policy follows the first critic, as in the paper.
- Deviation: a truncated episode bootstraps from its final observation.
"""

import torch
from pydantic import Field
from torch import Tensor

from core.agents.base.continuous_control import ControlAgentParams, CriticLosses, twin_losses
from core.agents.ddpg import DDPG
from core.common.settings import frozen_dataclass
from core.types import TransitionBatch


@frozen_dataclass
class TD3Params(ControlAgentParams):
    policy_update_period: int = Field(default=2, ge=1, le=10_000)
    """Updates of the critics for one of policy and targets, which move at these updates only (TD3: 2)."""
    smoothing_scale: float = Field(default=0.2, ge=0, le=1_000)
    """Standard deviation of the noise on the target's action, as a share of the range's half width (TD3: 0.2)."""
    smoothing_clip: float = Field(default=0.5, ge=0, le=1_000)
    """Largest size of the noise on the target's action, as a share of the range's half width (TD3: 0.5)."""


class TD3(DDPG):
    """DDPG with two critics, the first of which the policy follows."""

    Params = TD3Params
    supports_cuda_graphs = True
    required_output = "policy-twin-value"

    def bootstrap(self, transitions: TransitionBatch) -> Tensor:
        """Compute the target critics' outputs at the target policy's action with clipped noise (equation 14)."""
        observation, clip = transitions.next_observation, self.params.smoothing_clip
        action = self.target.policy(observation)
        noise = (self.params.smoothing_scale * torch.randn_like(action)).clamp_(-clip, clip)
        outputs: Tensor = self.target.critic(observation, (action + noise).clamp_(-1, 1))
        return outputs

    def critic_losses(self, transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        return twin_losses(transitions, outputs, bootstrap)
