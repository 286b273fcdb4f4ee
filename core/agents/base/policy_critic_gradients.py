"""Gradients of policy and critic, whose parameters are views of one vector: by autograd, the reference, or by hand.

On a CPU an update of small networks spends as much on operators and fresh memory as on arithmetic. Where both networks
are perceptrons, `ManualGradients` therefore differentiates them by hand, in buffers that stay in the processor's cache.
Both ways fill the same gradients. The gradient of the policy's loss is never taken with respect to the critic's
parameters.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from core.model import PerceptronLayers, PolicyAndCritic

SmoothAction = Callable[[Tensor], Tensor]  # maps the target policy's actions [B, A] to those that are bootstrapped from


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
        self.policy_parameters = list(model.policy.parameters())
        self.critic_parameters = list(model.critic.parameters())
        border = sum(parameter.numel() for parameter in self.policy_parameters)
        self.policy, self.critic = nn.Parameter(self.both[:border]), nn.Parameter(self.both[border:])
        self.policy.grad, self.critic.grad = gradient[:border], gradient[border:]


class Gradients(Protocol):
    """Forward passes of policy and critics, and the gradients of losses of their last outputs.

    Outputs are [C, B, N]: N numbers from each of C critics. `output_gradients` [C, B, N] is the derivative of a loss
    with respect to the last outputs. AutogradGradients computes it from the loss, ManualGradients uses what it is
    given.
    """

    online: FlatParameters
    target: FlatParameters

    def bootstrap(self, observation: Tensor, smooth_action: SmoothAction) -> Tensor:
        """Compute the target critics' outputs for the target policy's smoothed actions, without gradient."""

    def critic_values(self, observation: Tensor, action: Tensor) -> Tensor:
        """Compute the critics' outputs for actions [B, A]."""

    def differentiate_critic(self, loss: Tensor, output_gradients: Tensor) -> None:
        """Fill the critics' gradients from a loss of the outputs of `critic_values`."""

    def critic_values_of_policy(self, observation: Tensor) -> Tensor:
        """Compute the first critic's outputs [1, B, N] for the policy's own actions."""

    def differentiate_policy(self, loss: Tensor, output_gradients: Tensor) -> None:
        """Fill the policy's gradient from a loss of the outputs of `critic_values_of_policy`."""


def make_gradients(model: PolicyAndCritic, target: PolicyAndCritic, lean: bool) -> Gradients:
    """Make ManualGradients if `lean` and both networks are perceptrons on a CPU in float32, else AutogradGradients."""
    plain = next(model.parameters()).device.type == "cpu" and model.precision == "float32"
    by_hand = lean and plain and model.perceptron_layers() is not None
    return ManualGradients(model, target) if by_hand else AutogradGradients(model, target)


class AutogradGradients:
    """Gradients by autograd, for networks of any kind."""

    def __init__(self, model: PolicyAndCritic, target: PolicyAndCritic):
        self._model, self._target = model, target
        self.online, self.target = FlatParameters(model), FlatParameters(target)

    @torch.no_grad()
    def bootstrap(self, observation: Tensor, smooth_action: SmoothAction) -> Tensor:
        outputs: Tensor = self._target.critic(observation, smooth_action(self._target.policy(observation)))
        return outputs

    def critic_values(self, observation: Tensor, action: Tensor) -> Tensor:
        outputs: Tensor = self._model.critic(observation, action)
        return outputs

    def differentiate_critic(self, loss: Tensor, output_gradients: Tensor) -> None:
        _refill(self.online.critic, self.online.critic_parameters, loss)

    def critic_values_of_policy(self, observation: Tensor) -> Tensor:
        outputs: Tensor = self._model.critic[:1](observation, self._model.policy(observation))
        return outputs

    def differentiate_policy(self, loss: Tensor, output_gradients: Tensor) -> None:
        _refill(self.online.policy, self.online.policy_parameters, loss)


def _refill(vector: nn.Parameter, parameters: list[nn.Parameter], loss: Tensor) -> None:
    assert vector.grad is not None
    vector.grad.zero_()
    torch.autograd.backward(loss, inputs=parameters)


class ManualGradients:
    """Gradients by hand, for perceptrons.

    tanh follows the policy's last layer. The first layer of a critic reads observation and action, side by side.
    """

    def __init__(self, model: PolicyAndCritic, target: PolicyAndCritic):
        self.online, self.target = FlatParameters(model), FlatParameters(target)
        self._policy, self._critics = _perceptrons(model)
        self._target_policy, self._target_critics = _perceptrons(target)
        self._observation = self._action = self._inputs = torch.empty(0)

    @torch.no_grad()
    def bootstrap(self, observation: Tensor, smooth_action: SmoothAction) -> Tensor:
        inputs = torch.cat([observation, smooth_action(self._target_policy(observation).tanh_())], 1)
        return torch.stack([critic(inputs) for critic in self._target_critics])

    @torch.no_grad()
    def critic_values(self, observation: Tensor, action: Tensor) -> Tensor:
        self._inputs = torch.cat([observation, action], 1)
        return torch.stack([critic(self._inputs) for critic in self._critics])

    @torch.no_grad()
    def differentiate_critic(self, loss: Tensor, output_gradients: Tensor) -> None:
        for critic, output_gradient in zip(self._critics, output_gradients):
            critic.differentiate_parameters(self._inputs, output_gradient)

    @torch.no_grad()
    def critic_values_of_policy(self, observation: Tensor) -> Tensor:
        self._observation, self._action = observation, self._policy(observation).tanh_()
        return self._critics[0](torch.cat([observation, self._action], 1)).clone()[None]

    @torch.no_grad()
    def differentiate_policy(self, loss: Tensor, output_gradients: Tensor) -> None:
        action_gradient = self._critics[0].differentiate_input(output_gradients[0])[:, -self._action.shape[1] :]
        tanh_gradient = torch.ops.aten.tanh_backward(action_gradient, self._action)
        self._policy.differentiate_parameters(self._observation, tanh_gradient)


class Perceptron:
    """Linear layers with ReLU between them. The output of a call lies in buffers that the next call overwrites."""

    def __init__(self, layers: PerceptronLayers):
        self._layers = layers
        self._transposed = [weight.detach().t() for weight, _ in layers]
        self._outputs: list[Tensor] = []  # of each layer, [B, units]
        self._input_gradients: list[Tensor] = []  # with respect to each layer's input, [B, inputs]

    def __call__(self, input: Tensor) -> Tensor:
        """Compute outputs [B, outputs] of inputs [B, inputs]."""
        if not self._outputs or len(self._outputs[0]) != len(input):
            self._outputs = [input.new_empty(len(input), len(bias)) for _, bias in self._layers]
            self._input_gradients = [input.new_empty(len(input), weight.shape[1]) for weight, _ in self._layers]
        for index, output in enumerate(self._outputs):
            torch.addmm(self._layers[index][1], input, self._transposed[index], out=output)
            input = output.relu_() if output is not self._outputs[-1] else output
        return input

    def differentiate_parameters(self, input: Tensor, gradient: Tensor) -> None:
        """Fill the parameters' gradients of the last call.

        Args:
            input: [B, inputs] of that call.
            gradient: [B, outputs] with respect to its outputs.
        """
        for index in reversed(range(len(self._layers))):
            (weight, bias), layer_input = self._layers[index], self._outputs[index - 1] if index else input
            torch.mm(gradient.t(), layer_input, out=weight.grad)
            torch.sum(gradient, 0, out=bias.grad)
            if index:
                gradient = self._backpropagate(index, gradient)

    def differentiate_input(self, gradient: Tensor) -> Tensor:
        """Return the gradient [B, inputs] of the last call's input, without those of the parameters."""
        for index in reversed(range(len(self._layers))):
            gradient = self._backpropagate(index, gradient)
        return gradient

    def _backpropagate(self, index: int, gradient: Tensor) -> Tensor:
        """Backpropagate through a layer to its input, and through the ReLU before it."""
        input_gradient = torch.mm(gradient, self._layers[index][0], out=self._input_gradients[index])
        if index:
            torch.ops.aten.threshold_backward.grad_input(
                input_gradient, self._outputs[index - 1], 0, grad_input=input_gradient
            )
        return input_gradient


def _perceptrons(model: PolicyAndCritic) -> tuple[Perceptron, list[Perceptron]]:
    layers = model.perceptron_layers()
    assert layers is not None
    return Perceptron(layers[0]), [Perceptron(critic) for critic in layers[1]]
