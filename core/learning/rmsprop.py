"""RMSProp with its epsilon under the root, as the papers of agents have it, or outside it, as torch has it.

    n <- decay n + (1 - decay) g^2,    m <- decay m + (1 - decay) g,    v = n - m^2 if centered, else n
    weight <- weight - lr g / sqrt(v + eps), or with eps outside the root weight - lr g / (sqrt(v) + eps)

- Sources: Graves 2013 (1308.0850, equations 38 to 41), which Nature DQN follows, and TensorFlow's RMSPropOptimizer,
  which Ape-X and IMPALA used. Both have eps under the root.
- Deviation: n starts at 0, as Graves has it; TensorFlow's starts at 1.
- Python reads no tensor in a step, so CUDA graphs can capture it with a learning rate on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class RMSProp(torch.optim.Optimizer):
    """The optimiser of the module's equations. Its state exists from the start and begins with zeros."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        decay: float,
        eps: float,
        eps_in_root: bool,
        centered: bool,
        weight_decay: float,
    ):
        defaults = {
            "lr": lr,
            "decay": decay,
            "eps": eps,
            "eps_in_root": eps_in_root,
            "centered": centered,
            "weight_decay": weight_decay,
            "differentiable": False,  # torch adds it to restored optimisers
        }
        super().__init__(parameters, defaults)
        for parameter in parameters:
            self.state[parameter]["square_avg"] = torch.zeros_like(parameter, requires_grad=False)
            if centered:
                self.state[parameter]["grad_avg"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._move(parameters, group)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        decay, eps = group["decay"], group["eps"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        squares = [self.state[parameter]["square_avg"] for parameter in parameters]
        torch._foreach_mul_(squares, decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - decay)
        if group["centered"]:
            means = [self.state[parameter]["grad_avg"] for parameter in parameters]
            torch._foreach_lerp_(means, gradients, 1 - decay)
            variances = list(torch._foreach_addcmul(squares, means, means, -1))
            torch._foreach_clamp_min_(variances, 0.0)  # rounding may take a variance below 0
        else:
            variances = [square.clone() for square in squares]
        if group["eps_in_root"]:
            torch._foreach_add_(variances, eps)
        torch._foreach_sqrt_(variances)
        if not group["eps_in_root"]:
            torch._foreach_add_(variances, eps)
        steps = torch._foreach_div(gradients, variances)  # type: ignore[arg-type]
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_sub_(parameters, steps)
