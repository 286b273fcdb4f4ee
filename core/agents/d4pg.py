"""D4PG, distributed distributional deterministic policy gradients (Barth-Maron et al. 2018, SyZipzbCb).

- DDPG with a categorical critic on a range of returns that the task sets, n-step returns and many actors.
- Replay is uniform or prioritised; the priority is the cross entropy less the target's own entropy.
- Deviation: a truncated episode bootstraps from its final observation.
"""

from pydantic import Field
from torch import Tensor

from core.agents.base.continuous_control import ControlAgentParams, CriticLosses
from core.agents.ddpg import DDPG
from core.common.settings import frozen_dataclass
from core.ops.distributional import categorical_mean, categorical_projection, kl_loss
from core.types import TransitionBatch


@frozen_dataclass
class D4PGParams(ControlAgentParams):
    n_step: int = Field(default=5, ge=1, le=100)
    """Steps of the return before it bootstraps (D4PG: 5)."""
    v_min: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Lower end of the support of returns; it depends on the task."""
    v_max: float = Field(default=1_000.0, ge=-1e9, le=1e9)
    """Upper end of the support of returns; it depends on the task."""
    learning_rate: float = Field(default=1e-4, gt=0, le=100)
    """Learning rate of the policy at the start (D4PG: 1e-4)."""
    critic_learning_rate: float = Field(default=1e-4, gt=0, le=100)
    """Learning rate of the critic at the start (D4PG: 1e-4)."""
    noise_scale: float = Field(default=0.3, ge=0, le=1_000)
    """Standard deviation of the noise, as a share of the range's half width (D4PG: 0.3)."""
    target_update_period: int = Field(default=100, ge=1, le=10**9)
    """Updates between updates of the targets (D4PG: 100)."""
    target_update_tau: float = Field(default=1.0, gt=0, le=1)
    """Weight of the online network in an update of the targets; 1 copies it."""


class D4PG(DDPG):
    """DDPG with a categorical critic."""

    Params = D4PGParams
    supports_cuda_graphs = True
    required_output = "policy-distribution"

    @classmethod
    def problems(cls, params: D4PGParams) -> list[str]:
        if params.v_min < params.v_max:
            return []
        return [f"agent.v_min={params.v_min} must be below agent.v_max={params.v_max}"]

    def critic_losses(self, transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        """Compute KL of Z(s, a) from the projection of R + D Z'(s_n, mu'(s_n)).

        Its gradient is that of the cross entropy (algorithm 1).
        """
        params, logits = self.params, outputs[0]  # [B, atoms]
        target = categorical_projection(
            bootstrap[0].softmax(1), transitions.returns, transitions.bootstrap_discounts, params.v_min, params.v_max
        )
        losses, values = kl_loss(logits, target), categorical_mean(logits.detach(), params.v_min, params.v_max)
        return CriticLosses(losses, losses.detach().clamp(min=0), {"q_mean": values.mean()})

    def policy_losses(self, outputs: Tensor) -> Tensor:
        """Compute - E[Z(s, mu(s))]."""
        return -categorical_mean(outputs, self.params.v_min, self.params.v_max)
