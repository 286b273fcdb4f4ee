"""Adam, RAdam and RMSProp as torch optimisers, whose steps CUDA graphs can capture.

Python reads no tensor in a step of RAdam and RMSProp, and their learning rate may be a tensor of the device. Their
state exists from the start and begins with zeros.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _construct_without_compiler() -> None:
    """Let torch construct optimisers without torch._dynamo, whose import takes a second.

    Each of these methods imports it at its first call, to be left out by torch.compile (torch/_compile.py).
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            vars(method).setdefault("__dynamo_disable", method)


_construct_without_compiler()


class Adam(torch.optim.Adam):
    """Adam as torch has it, without the decorator of its step that imports torch._dynamo."""

    step = torch.no_grad()(getattr(torch.optim.Adam.step, "__wrapped__", torch.optim.Adam.step))
    # Else torch would wrap it in a record for its profiler, which takes a tenth of a small step.
    step.hooked = True  # type: ignore[union-attr]


class _Capturable(torch.optim.Optimizer):
    """An optimiser that moves all parameters of a group together."""

    def __init__(self, parameters: list[nn.Parameter], **defaults: Any):
        super().__init__(parameters, {**defaults, "differentiable": False})  # torch adds it to restored optimisers

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                gradients = [parameter.grad for parameter in parameters]
                if group["weight_decay"]:
                    gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
                self._move(parameters, gradients, group)

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _states(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in parameters]


BETA1, BETA2 = 0.9, 0.999
MAX_LENGTH = 2 / (1 - BETA2) - 1  # p of RAdam's equations


class RAdam(_Capturable):
    """RAdam (1908.03265, algorithm 2).

        m <- b1 m + (1 - b1) g,    v <- b2 v + (1 - b2) g^2,    b1 = 0.9,    b2 = 0.999
        p = 2 / (1 - b2) - 1,    p_t = p - 2 t b2^t / (1 - b2^t)
        r = sqrt((p_t - 4) (p_t - 2) p / ((p - 4) (p - 2) p_t)) / (sqrt(v / (1 - b2^t)) + eps)  if p_t > 5, else r = 1
        weight <- weight - lr r m / (1 - b1^t)

    - The paper has no eps and the threshold 4. Those here are optax's, with which PQN was published, and torch's.
    - torch.optim.RAdam reads its step count in Python, except on CUDA.
    """

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, eps: float, weight_decay: float):
        super().__init__(parameters, lr=lr, eps=eps, weight_decay=weight_decay)
        for parameter in parameters:
            self.state[parameter] = {
                "count": torch.zeros((), device=parameter.device),  # torch would leave a "step" on another device
                "mean": torch.zeros_like(parameter, requires_grad=False),
                "square": torch.zeros_like(parameter, requires_grad=False),
            }

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        counts, means, squares = (self._states(parameters, name) for name in ("count", "mean", "square"))
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
    """Return for each count t the factors s, a and b of RAdam's step (a / (s sqrt(v) + eps) + b) m.

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


class RMSProp(_Capturable):
    """RMSProp with its epsilon under the root, as the papers of agents have it, or outside it, as torch has it.

        n <- decay n + (1 - decay) g^2,    m <- decay m + (1 - decay) g,    v = n - m^2 if centered, else n
        weight <- weight - lr g / sqrt(v + eps), or with eps outside the root weight - lr g / (sqrt(v) + eps)

    - Sources: Graves 2013 (1308.0850, equations 38 to 41), which Nature DQN follows, and TensorFlow's RMSPropOptimizer,
      which Ape-X and IMPALA used. Both have eps under the root.
    - Deviation: n starts at 0, as Graves has it; TensorFlow's starts at 1.
    """

    def __init__(self, parameters: list[nn.Parameter], *, centered: bool, **settings: Any):
        """Bind the parameters; settings are lr, decay, eps, eps_in_root and weight_decay."""
        super().__init__(parameters, centered=centered, **settings)
        for parameter in parameters:
            for name in ("square_avg", "grad_avg") if centered else ("square_avg",):
                self.state[parameter][name] = torch.zeros_like(parameter, requires_grad=False)

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        decay, eps = group["decay"], group["eps"]
        squares = self._states(parameters, "square_avg")
        torch._foreach_mul_(squares, decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - decay)
        if group["centered"]:
            means = self._states(parameters, "grad_avg")
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
