"""Gradients of policy and critic, and the parameters of both as one vector: by autograd, which is the reference, or lean.

On a CPU an update of small networks spends as much on operators and fresh memory as on arithmetic. Where both networks are perceptrons,
`ManualGradients` differentiates them by hand, in buffers that stay in the processor's cache. Both ways fill the same gradients. Those of
the policy's loss are never taken with respect to the critic's parameters.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from core.model import PerceptronLayers, PolicyAndCritic

Smoothing = Callable[[Tensor], Tensor]  # of the target policy's actions [B, A]


class FlatParameters:
    """The parameters of policy and critics become views of one vector, and their gradients of another.

    So an optimiser, of `policy` or `critic`, and a target, of `both`, need one operator each.
    """

    def __init__(self, model: PolicyAndCritic):
        self.of_policy, self.of_critic = list(model.policy.parameters()), list(model.critic.parameters())
        parts = self.of_policy + self.of_critic
        self.both = torch.cat([part.detach().flatten() for part in parts])
        gradient, offset = torch.zeros_like(self.both), 0
        for part in parts:
            places = slice(offset, offset + part.numel())
            part.data, part.grad = self.both[places].view_as(part), gradient[places].view_as(part)
            offset += part.numel()
        border = sum(part.numel() for part in self.of_policy)
        self.policy, self.critic = nn.Parameter(self.both[:border]), nn.Parameter(self.both[border:])
        self.policy.grad, self.critic.grad = gradient[:border], gradient[border:]


class Gradients(Protocol):
    """Outputs are [C, B, N]: of C critics N numbers each. `slopes` [C, B, N] is a loss's derivative with respect to the last outputs.

    Eager asks autograd for it, Lean believes what it is given.
    """

    online: FlatParameters
    target: FlatParameters

    def bootstrap(self, observation: Tensor, smoothing: Smoothing) -> Tensor:
        """What the target critics say of the target policy's action, without gradient."""

    def critic_values(self, observation: Tensor, action: Tensor) -> Tensor:
        """What the critics say of actions [B, A]."""

    def differentiate_critic(self, loss: Tensor, slopes: Tensor) -> None:
        """Fill the critics' gradients by those of a loss of `critic_values`'s outputs."""

    def criticise_policy(self, observation: Tensor) -> Tensor:
        """What the first critic says of the policy's own actions, [1, B, N]."""

    def differentiate_policy(self, loss: Tensor, slopes: Tensor) -> None:
        """Fill the policy's gradient by that of a loss of `critic_values_policy`'s outputs."""


def gradients(model: PolicyAndCritic, target: PolicyAndCritic, lean: bool) -> Gradients:
    """Lean where it is wanted and both networks are perceptrons on a CPU, in float32."""
    plain = next(model.parameters()).device.type == "cpu" and model.precision == "float32"
    return ManualGradients(model, target) if lean and plain and model.perceptrons() is not None else AutogradGradients(model, target)


class AutogradGradients:
    def __init__(self, model: PolicyAndCritic, target: PolicyAndCritic):
        self._model, self._target = model, target
        self.online, self.target = FlatParameters(model), FlatParameters(target)

    @torch.no_grad()
    def bootstrap(self, observation: Tensor, smoothing: Smoothing) -> Tensor:
        return self._target.critic(observation, smoothing(self._target.policy(observation)))

    def critic_values(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._model.critic(observation, action)

    def differentiate_critic(self, loss: Tensor, slopes: Tensor) -> None:
        _refill(self.online.critic, self.online.of_critic, loss)

    def criticise_policy(self, observation: Tensor) -> Tensor:
        return self._model.critic[:1](observation, self._model.policy(observation))

    def differentiate_policy(self, loss: Tensor, slopes: Tensor) -> None:
        _refill(self.online.policy, self.online.of_policy, loss)


def _refill(vector: nn.Parameter, parts: list[nn.Parameter], loss: Tensor) -> None:
    assert vector.grad is not None
    vector.grad.zero_()
    loss.backward(inputs=parts)


class ManualGradients:
    """tanh comes after the policy's last layer; observation and action, side by side, go into the critics' first."""

    def __init__(self, model: PolicyAndCritic, target: PolicyAndCritic):
        self.online, self.target = FlatParameters(model), FlatParameters(target)
        self._policy, self._critics = _perceptrons(model)
        self._target_policy, self._target_critics = _perceptrons(target)
        self._observation = self._action = self._inputs = torch.empty(0)

    @torch.no_grad()
    def bootstrap(self, observation: Tensor, smoothing: Smoothing) -> Tensor:
        inputs = torch.cat([observation, smoothing(self._target_policy(observation).tanh_())], 1)
        return torch.stack([critic(inputs) for critic in self._target_critics])

    @torch.no_grad()
    def critic_values(self, observation: Tensor, action: Tensor) -> Tensor:
        self._inputs = torch.cat([observation, action], 1)
        return torch.stack([critic(self._inputs) for critic in self._critics])

    @torch.no_grad()
    def differentiate_critic(self, loss: Tensor, slopes: Tensor) -> None:
        for critic, slope in zip(self._critics, slopes):
            critic.fill(self._inputs, slope)

    @torch.no_grad()
    def criticise_policy(self, observation: Tensor) -> Tensor:
        self._observation, self._action = observation, self._policy(observation).tanh_()
        return self._critics[0](torch.cat([observation, self._action], 1)).clone()[None]

    @torch.no_grad()
    def differentiate_policy(self, loss: Tensor, slopes: Tensor) -> None:
        action = self._critics[0].back(slopes[0])[:, -self._action.shape[1]:]
        self._policy.fill(self._observation, torch.ops.aten.tanh_backward(action, self._action))


class Perceptron:
    """Linear layers with ReLU between them. What a call gives lies in buffers that the next call uses again."""

    def __init__(self, layers: PerceptronLayers):
        self._layers = layers
        self._transposed = [weight.detach().t() for weight, _ in layers]
        self._outputs: list[Tensor] = []    # of each layer, [B, units]
        self._gradients: list[Tensor] = []  # with respect to what each layer is given

    def __call__(self, input: Tensor) -> Tensor:
        """[B, inputs] to [B, outputs]."""
        if not self._outputs or len(self._outputs[0]) != len(input):
            self._outputs = [input.new_empty(len(input), len(bias)) for _, bias in self._layers]
            self._gradients = [input.new_empty(len(input), weight.shape[1]) for weight, _ in self._layers]
        for number, output in enumerate(self._outputs):
            torch.addmm(self._layers[number][1], input, self._transposed[number], out=output)
            input = output.relu_() if output is not self._outputs[-1] else output
        return input

    def fill(self, input: Tensor, gradient: Tensor) -> None:
        """The parameters' gradients, of the last call, which had this input; `gradient` [B, outputs] is that of its outputs."""
        for number in reversed(range(len(self._layers))):
            (weight, bias), given = self._layers[number], self._outputs[number - 1] if number else input
            torch.mm(gradient.t(), given, out=weight.grad)
            torch.sum(gradient, 0, out=bias.grad)
            if number:
                gradient = self._through(number, gradient)

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient [B, inputs] of the last call's input; that of the parameters is not made."""
        for number in reversed(range(len(self._layers))):
            gradient = self._through(number, gradient)
        return gradient

    def _through(self, number: int, gradient: Tensor) -> Tensor:
        """From what a layer gives to what it is given, and on through the ReLU before it."""
        before = torch.mm(gradient, self._layers[number][0], out=self._gradients[number])
        if number:
            torch.ops.aten.threshold_backward.grad_input(before, self._outputs[number - 1], 0, grad_input=before)
        return before


def _perceptrons(model: PolicyAndCritic) -> tuple[Perceptron, list[Perceptron]]:
    found = model.perceptrons()
    assert found is not None
    return Perceptron(found[0]), [Perceptron(layers) for layers in found[1]]
