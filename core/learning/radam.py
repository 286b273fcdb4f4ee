"""RAdam (1908.03265, algorithm 2), for steps that CUDA graphs can capture.

    m <- b1 m + (1 - b1) g,    v <- b2 v + (1 - b2) g^2,    b1 = 0.9,    b2 = 0.999
    p = 2 / (1 - b2) - 1,    p_t = p - 2 t b2^t / (1 - b2^t)
    r = sqrt((p_t - 4) (p_t - 2) p / ((p - 4) (p - 2) p_t)) / (sqrt(v / (1 - b2^t)) + eps)  if p_t > 5, else r = 1
    weight <- weight - lr r m / (1 - b1^t)

- The paper has no eps and the threshold 4. Those here are optax's, with which PQN was published, and torch's.
- torch.optim.RAdam reads its step count in Python, except on CUDA. Here Python reads no tensor in a step, as in
  core/learning/rmsprop.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BETA1, BETA2 = 0.9, 0.999
MAX_LENGTH = 2 / (1 - BETA2) - 1  # p of the module's equations


class RAdam(torch.optim.Optimizer):
    """The optimiser of the module's equations. Its state exists from the start and begins with zeros."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, eps: float, weight_decay: float):
        # torch adds "differentiable" to restored optimisers.
        super().__init__(parameters, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "differentiable": False})
        for parameter in parameters:
            self.state[parameter] = {
                "count": torch.zeros((), device=parameter.device),  # torch would leave a "step" on another device
                "mean": torch.zeros_like(parameter, requires_grad=False),
                "square": torch.zeros_like(parameter, requires_grad=False),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._move(parameters, group)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        counts, means, squares = (
            [self.state[parameter][name] for parameter in parameters] for name in ("count", "mean", "square")
        )
        torch._foreach_add_(counts, 1)
        torch._foreach_lerp_(means, gradients, 1 - BETA1)
        torch._foreach_mul_(squares, BETA2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - BETA2)
        scales, rectified, plain = _factors(torch.stack(counts), group["lr"])
        steps = list(torch._foreach_sqrt(squares))
        torch._foreach_mul_(steps, scales)
        torch._foreach_add_(steps, group["eps"])
        torch._foreach_reciprocal_(steps)
        torch._foreach_mul_(steps, rectified)
        torch._foreach_add_(steps, plain)
        torch._foreach_mul_(steps, means)
        torch._foreach_sub_(parameters, steps)


def _factors(counts: Tensor, lr: float | Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return for each count t the factors s, a and b of the step (a / (s sqrt(v) + eps) + b) m.

    They are float64, because p_t is a small difference of large numbers.
    """
    counts = counts.double()
    decayed = BETA2**counts
    lengths = MAX_LENGTH - 2 * counts * decayed / (1 - decayed)
    is_rectified, long = lengths > 5, lengths.clamp(min=5)
    ratios = (long - 4) * (long - 2) * MAX_LENGTH / ((MAX_LENGTH - 4) * (MAX_LENGTH - 2) * long)
    rates = lr / (1 - BETA1**counts)
    factors = (1 - decayed).rsqrt(), torch.where(is_rectified, rates * ratios.sqrt(), 0), rates * ~is_rectified
    return tuple(list(factor.unbind()) for factor in factors)  # type: ignore[return-value]
