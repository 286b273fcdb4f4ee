"""Step optimisers with learning-rate schedule, gradient clipping and averaging over learners, for every agent."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.distributed.learner_group import all_reduce_sum, num_learners
from core.learning.device_schedule import ScheduledTensor
from core.learning.microbatches import Differentiate, Loss, gradient_of
from core.ops.schedules import SCHEDULES


@frozen_dataclass
class OptimizerParams:
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Optimiser of the network."""
    learning_rate: float = Field(default=1e-4, gt=0, le=100)
    """Learning rate at the start."""
    optimizer_eps: float = Field(default=1.5e-4, gt=0, le=1)
    """Added to the root of the second moment; in TensorFlow's RMSProp to what is under it."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Weight of the L2 penalty on the parameters; 0 is off."""
    rmsprop_decay: float = Field(default=0.95, ge=0, le=1)
    """Decay of RMSProp's moments (Ape-X: 0.95, IMPALA: 0.99)."""
    rmsprop_centered: bool = True
    """Divide RMSProp's steps by the standard deviation (Ape-X: yes, IMPALA: no)."""
    lr_schedule: Literal["constant", "linear", "polynomial", "step"] = "constant"
    """Schedule of the learning rate over the updates."""
    lr_end: float = Field(default=0.0, ge=0, le=100)
    """Learning rate that a schedule ends at."""
    lr_schedule_updates: int = Field(default=1_000_000, ge=1, le=10**12)
    """Updates that a schedule takes; for "step" those between two steps."""
    lr_decay: float = Field(default=0.5, gt=0, le=100)
    """Factor of schedule "step", exponent of schedule "polynomial"."""
    clip_norm: float = Field(default=10.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; 0 is off."""
    clip_value: float = Field(default=0.0, ge=0, le=1e9)
    """Largest size of each element of the gradient; 0 is off."""


class Optimizer:
    """An optimiser with everything that belongs to its step.

    Several learners step with the gradient of all their batches: the mean of their gradients or, with `sums`, the sum.
    So n batches of B windows give the step of one batch of n B.

    Once steps are planned (`plan`), python reads no tensor in them, so that they can be captured as a CUDA graph.

    Args:
        sums: losses are sums over the windows of a batch; else they are means.
        period: updates of the agent for one step of this optimiser. Schedules count updates.
    """

    # Learning rates of the planned steps, and that of the current one.
    _planned: ScheduledTensor | None = None
    _planned_lr: Tensor

    def __init__(
        self, parameters: Iterable[nn.Parameter], params: OptimizerParams, sums: bool = False, period: int = 1
    ):
        self._parameters, self._params, self._sums, self._period = list(parameters), params, sums, period
        self._steps = 0
        self._optimizer: torch.optim.Optimizer
        if params.optimizer == "adam":
            self._optimizer = torch.optim.Adam(
                self._parameters,
                lr=params.learning_rate,
                eps=params.optimizer_eps,
                weight_decay=params.weight_decay,
                fused=True,
            )
        else:
            self._optimizer = torch.optim.RMSprop(
                self._parameters,
                lr=params.learning_rate,
                eps=params.optimizer_eps,
                alpha=params.rmsprop_decay,
                centered=params.rmsprop_centered,
                weight_decay=params.weight_decay,
                foreach=True,
            )

    @property
    def lr(self) -> float:
        return self._lr_of(self._steps)

    @property
    def rate(self) -> Tensor:
        """Return the learning rate as a metric; for planned steps that of the current one, on the device."""
        return torch.tensor(self.lr) if self._planned is None else self._planned_lr

    def _lr_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, which is taken in the last update of its period."""
        params, update = self._params, (step + 1) * self._period - 1
        return SCHEDULES[params.lr_schedule](
            update, params.learning_rate, params.lr_end, params.lr_schedule_updates, params.lr_decay
        )

    def plan(self, count: int) -> None:
        """Plan the next `count` steps: their learning rates go to the device, and python reads no tensor in `step`."""
        if self._planned is None:
            self._planned = ScheduledTensor(self._lr_of, self._parameters[0].device)
            # Else torch warns about the steps before the capture.
            self._optimizer._warned_capturable_if_run_uncaptured = True
            for parameter, state in self._optimizer.state.items():
                # A restored optimiser may count its steps on the CPU.
                state["step"] = state["step"].to(parameter.device)
        self._planned.plan(self._steps, count)
        self._steps += count

    def minimise(self, total: int, loss_of: Callable[[slice | None], Loss]) -> tuple[Loss, Tensor, Any]:
        """Step once to minimise the loss of a batch.

        Args:
            total: windows of the batch.
            loss_of: returns the loss of some of the windows or, given None, of all. With learner.microbatch_on_oom, a
            batch
                that exceeds the GPU's memory is differentiated part by part (core/learning/microbatches.py).

        Returns:
            The loss of the batch, and what `apply` returns.
        """

        def differentiate(part: slice | None) -> Loss:
            loss = loss_of(part)
            self._optimizer.zero_grad(set_to_none=True)
            loss.loss.backward()
            return loss._replace(loss=loss.loss.detach())

        loss = self.gradient_of(total, differentiate)
        return loss, *self.apply(loss.loss)

    def gradient_of(self, total: int, differentiate: Differentiate) -> Loss:
        """Set the gradients to those of a batch of `total` windows, computed by `differentiate`."""
        return gradient_of(self._parameters, total, self._sums, differentiate)

    def step(self, loss: Tensor, apply_if: Any = True) -> tuple[Tensor, Any]:
        """Backpropagate, then `apply`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return self.apply(loss, apply_if)

    def apply(self, loss: Tensor, apply_if: Any = True) -> tuple[Tensor, Any]:
        """Clip the current gradients and step, unless the loss or gradient of any learner is not finite.

        Args:
            loss: scalar, only tested for being finite.
            apply_if: skip the step if false; for planned steps a tensor, such as another step of the same update
                returned.

        Returns:
            The gradient's norm before clipping, and whether the step was applied; a tensor if the step was planned.
        """
        loss = loss.detach() if num_learners() == 1 else self._reduce_over_learners(loss.detach())
        if self._params.clip_value:
            nn.utils.clip_grad_value_(self._parameters, self._params.clip_value)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if len(gradients) > 1:
            norm = nn.utils.get_total_norm(gradients, foreach=True)
        else:
            norm = torch.linalg.vector_norm(gradients[0])
        if self._params.clip_norm:
            nn.utils.clip_grads_with_norm_(self._parameters, self._params.clip_norm, norm, foreach=True)
        if self._planned is not None:
            return norm, self._apply_planned(torch.isfinite(norm + loss) & apply_if)
        applied = bool(apply_if) and math.isfinite(norm + loss)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"], group["capturable"] = self.lr, False
            self._optimizer.step()
        self._steps += 1
        return norm, applied

    @torch.no_grad()
    def _reduce_over_learners(self, loss: Tensor) -> Tensor:
        """Replace gradients and return the loss of all learners. A missing gradient counts as zero."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._parameters
        ]
        flat = torch.cat([tensor.reshape(-1) for tensor in (*gradients, loss)])
        all_reduce_sum(flat)
        if not self._sums:
            flat /= num_learners()
        *parts, loss = flat.split([tensor.numel() for tensor in (*gradients, loss)])
        torch._foreach_copy_(gradients, [part.view(gradient.shape) for part, gradient in zip(parts, gradients)])
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient
        return loss.squeeze(0)

    @torch.no_grad()
    def _apply_planned(self, apply_if: Tensor) -> Tensor:
        """Take a planned step, which the device applies or not.

        Fused Adam skips its step if `found_inf` is set, which is how GradScaler uses it. A skipped step of RMSprop is
        undone.
        """
        assert self._planned is not None
        self._planned_lr = self._planned.take()
        for group in self._optimizer.param_groups:
            group["lr"], group["capturable"] = self._planned_lr, self._planned_lr.is_cuda
        if self._params.optimizer == "adam":
            self._optimizer.found_inf = (~apply_if).to(torch.float32)  # type: ignore[attr-defined]
            self._optimizer.step()
            return apply_if
        before = [tensor.clone() for tensor in self._tensors()]
        self._optimizer.step()
        for number, tensor in enumerate(self._tensors()):
            # The first step creates its state, which begins with zeros.
            old = before[number] if number < len(before) else torch.zeros_like(tensor)
            torch.where(apply_if, tensor, old, out=tensor)
        return apply_if

    def _tensors(self) -> list[Tensor]:
        """Return all tensors that a step changes."""
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return [*self._parameters, *(value for value in state if isinstance(value, Tensor))]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "updates": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments and counts. Settings stay those of this start."""
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group.update(self._optimizer.defaults)
        self._steps = state["updates"]
