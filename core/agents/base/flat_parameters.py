"""One vector of the parameters of policy and critics, and another of their gradients."""

import torch
from torch import Tensor, nn

from core.model import PolicyAndCritic


class FlatParameters:
    """One vector whose views are the parameters of policy and critics, and another for their gradients.

    An optimiser of `policy` or `critic`, and a target update of `both`, therefore need one operator each. The model
    gets new parameters, which share the vector's memory and its count of changes (`Tensor._version`).
    """

    def __init__(self, model: PolicyAndCritic):
        names, olds = zip(*[item for item in model.named_parameters() if item[0].startswith(("policy.", "critic."))])
        self.both = torch.cat([old.detach().flatten() for old in olds])
        gradient, offset = torch.zeros_like(self.both), 0
        for name, old in zip(names, olds):
            span = slice(offset, offset + old.numel())
            new = nn.Parameter(self.both[span].view_as(old), old.requires_grad)
            new.grad = gradient[span].view_as(old)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, new)
            offset += old.numel()
        self._policy_parameters = list(model.policy.parameters())
        self._critic_parameters = list(model.critic.parameters())
        border = sum(parameter.numel() for parameter in self._policy_parameters)
        self.policy, self.critic = nn.Parameter(self.both[:border]), nn.Parameter(self.both[border:])
        self.policy.grad, self.critic.grad = gradient[:border], gradient[border:]

    def differentiate_policy(self, loss: Tensor) -> None:
        """Set the policy's gradient to that of a loss; the critics' gradient stays as it is."""
        self._differentiate(loss, self.policy, self._policy_parameters)

    def differentiate_critic(self, loss: Tensor) -> None:
        """Set the critics' gradient to that of a loss."""
        self._differentiate(loss, self.critic, self._critic_parameters)

    def _differentiate(self, loss: Tensor, vector: nn.Parameter, parameters: list[nn.Parameter]) -> None:
        assert vector.grad is not None
        vector.grad.zero_()
        torch.autograd.backward(loss, inputs=parameters)
