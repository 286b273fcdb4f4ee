"""The part that DDPG and its descendants share: a policy of one action, which ascends the critic's value of it."""

from abc import abstractmethod

import torch
from torch import Tensor

from core.agents.base.continuous_control import ContinuousControl, TransitionBatch
from core.learning.gradients import Loss


class Deterministic(ContinuousControl):
    """Base of agents whose policy outputs one action."""

    def smooth_target_action(self, action: Tensor) -> Tensor:
        """Return the target policy's actions [B, A] as they are bootstrapped from; the default changes nothing."""
        return action

    @abstractmethod
    def policy_losses(self, outputs: Tensor) -> Tensor:
        """Compute the losses [B] of the first critic's outputs [B, N] for the policy's own actions."""

    @torch.no_grad()
    def bootstrap(self, transitions: TransitionBatch) -> Tensor:
        observation = transitions.next_observation
        outputs: Tensor = self.target.critic(observation, self.smooth_target_action(self.target.policy(observation)))
        return outputs

    def update_policy(
        self, transitions: TransitionBatch, apply_if: bool | Tensor
    ) -> tuple[dict[str, Tensor], bool | Tensor]:
        def differentiate(part: slice | None) -> Loss:
            observation = transitions.select(part).observation
            loss = self.policy_losses(self.model.critic[0](observation, self.model.policy(observation))).mean()
            self.online_vectors.differentiate_policy(loss)
            return Loss(loss.detach(), {})

        total = self.policy_optimizer.gradient_of(len(transitions.returns), differentiate)
        grad_norm, applied = self.policy_optimizer.apply(total.loss, apply_if)
        return {"policy_loss": total.loss, "policy_grad_norm": grad_norm}, applied


def value_losses(outputs: Tensor) -> Tensor:
    """Compute - Q(s, mu(s)) of a critic that outputs one value (DDPG: 1509.02971, equation 6)."""
    return -outputs[:, 0]
