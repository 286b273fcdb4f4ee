"""What DDPG and its descendants share: a policy that names one action, which follows the critic's slope with respect to it."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from core.agents.base.continuous_control import ContinuousControl, Step
from core.learning.microbatches import Loss


class PolicyLosses(NamedTuple):
    losses: Tensor  # [B]
    slopes: Tensor  # [1, B, N] their derivative with respect to what the first critic gave


class Deterministic(ContinuousControl):
    def smoothed(self, action: Tensor) -> Tensor:
        """The target policy's actions [B, A] as they are bootstrapped from."""
        return action

    @abstractmethod
    def policy_losses(self, outputs: Tensor) -> PolicyLosses:
        """Of what the first critic, [1, B, N], says of the policy's own actions."""

    def bootstrap(self, step: Step) -> Tensor:
        return self.gradients.bootstrap(step.next_observation, self.smoothed)

    def improve(self, step: Step, wanted: bool | Tensor) -> tuple[dict[str, Tensor], bool | Tensor]:
        def differentiate(part: slice | None) -> Loss:
            found = self.policy_losses(self.gradients.criticise_policy(step.part(part).observation))
            loss = found.losses.mean()
            self.gradients.differentiate_policy(loss, found.slopes / len(found.losses))
            return Loss(loss.detach(), {})

        found = self.policy_optimizer.gradient_of(len(step.returns), differentiate)
        norm, stepped = self.policy_optimizer.apply(found.loss, wanted)
        return {"policy_loss": found.loss, "policy_grad_norm": norm}, stepped


def value_losses(outputs: Tensor) -> PolicyLosses:
    """- Q(s, mu(s)) of a critic that gives one value (DDPG: 1509.02971, equation 6)."""
    return PolicyLosses(-outputs[0, :, 0], -torch.ones_like(outputs))
