"""The part that DDPG and its descendants share: a policy of one action, which ascends the critic's value of it."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from core.agents.base.continuous_control import ContinuousControl, TransitionBatch
from core.learning.optimizer import Loss


class PolicyLosses(NamedTuple):
    """Losses of the first critic's outputs [1, B, N] for the policy's own actions."""

    losses: Tensor  # [B]
    output_gradients: Tensor  # [1, B, N] derivatives of the losses with respect to the outputs


class Deterministic(ContinuousControl):
    """Base of agents whose policy outputs one action."""

    def smooth_target_action(self, action: Tensor) -> Tensor:
        """Return the target policy's actions [B, A] as they are bootstrapped from; the default changes nothing."""
        return action

    @abstractmethod
    def policy_losses(self, outputs: Tensor) -> PolicyLosses:
        """Compute the losses of the first critic's outputs [1, B, N] for the policy's own actions."""

    def bootstrap(self, transitions: TransitionBatch) -> Tensor:
        return self.gradients.bootstrap(transitions.next_observation, self.smooth_target_action)

    def update_policy(
        self, transitions: TransitionBatch, apply_if: bool | Tensor
    ) -> tuple[dict[str, Tensor], bool | Tensor]:
        def differentiate(part: slice | None) -> Loss:
            outputs = self.gradients.critic_values_of_policy(transitions.select(part).observation)
            policy = self.policy_losses(outputs)
            loss = policy.losses.mean()
            self.gradients.differentiate_policy(loss, policy.output_gradients / len(policy.losses))
            return Loss(loss.detach(), {})

        total = self.policy_optimizer.gradient_of(len(transitions.returns), differentiate)
        grad_norm, applied = self.policy_optimizer.apply(total.loss, apply_if)
        return {"policy_loss": total.loss, "policy_grad_norm": grad_norm}, applied


def value_losses(outputs: Tensor) -> PolicyLosses:
    """Compute - Q(s, mu(s)) of a critic that outputs one value (DDPG: 1509.02971, equation 6)."""
    return PolicyLosses(-outputs[0, :, 0], -torch.ones_like(outputs))
