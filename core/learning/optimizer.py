"""Optimiser, learning-rate schedule and clipping, shared by every agent."""

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
    lr: float = Field(default=1e-4, gt=0, le=100)
    """Learning rate at the start."""
    eps: float = Field(default=1.5e-4, gt=0, le=1)
    """Added to the root of the second moment; in TensorFlow's RMSProp to what is under it."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Weight of the L2 penalty on the parameters; 0 is off."""
    rmsprop_decay: float = Field(default=0.95, ge=0, le=1)
    """Decay of RMSProp's moments (Ape-X: 0.95, IMPALA: 0.99)."""
    rmsprop_centered: bool = True
    """Divide RMSProp's steps by the standard deviation (Ape-X: yes, IMPALA: no)."""
    lr_schedule: Literal["constant", "linear", "polynomial", "step"] = "constant"
    """Schedule of lr over the updates."""
    lr_end: float = Field(default=0.0, ge=0, le=100)
    """Learning rate that a schedule ends at."""
    lr_updates: int = Field(default=1_000_000, ge=1, le=10**12)
    """Updates that a schedule takes; for "step" those between two steps."""
    lr_decay: float = Field(default=0.5, gt=0, le=100)
    """Factor of schedule "step", exponent of schedule "polynomial"."""
    clip_norm: float = Field(default=10.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; 0 is off."""
    clip_value: float = Field(default=0.0, ge=0, le=1e9)
    """Largest size of each element of the gradient; 0 is off."""


class Optimizer:
    """One optimiser step with everything that belongs to it.

    Several learners step with the gradient of all their batches together: the mean of theirs, or with `sums` the sum, where losses are
    sums over the batch. So n batches of B windows are one of n B.
    """

    _planned: ScheduledTensor | None = None  # learning rates of the next updates
    _planned_lr: Tensor              # of the update in hand

    def __init__(self, parameters: Iterable[nn.Parameter], params: OptimizerParams, sums: bool = False, period: int = 1):
        """`period`: updates of the agent for one step of this optimiser; schedules count the updates."""
        self._parameters, self._params, self._sums, self._updates = list(parameters), params, sums, 0
        self._period = period
        if params.optimizer == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.Adam(
                self._parameters, lr=params.lr, eps=params.eps, weight_decay=params.weight_decay, fused=True)
        else:
            self._optimizer = torch.optim.RMSprop(
                self._parameters, lr=params.lr, eps=params.eps, alpha=params.rmsprop_decay, centered=params.rmsprop_centered,
                weight_decay=params.weight_decay, foreach=True)

    @property
    def lr(self) -> float:
        return self._lr_of(self._updates)

    @property
    def rate(self) -> Tensor:
        """`lr` as a report wants it; of planned updates that of the one in hand, on the device."""
        return torch.tensor(self.lr) if self._planned is None else self._planned_lr

    def _lr_of(self, step: int) -> float:
        """Return the rate of step number `step`, from 0: it is taken in the last of as many updates as a period has."""
        params, update = self._params, (step + 1) * self._period - 1
        return SCHEDULES[params.lr_schedule](update, params.lr, params.lr_end, params.lr_updates, params.lr_decay)

    def plan(self, count: int) -> None:
        """The next `count` steps may be recorded and replayed: from now on python reads no tensor in `step`."""
        if self._planned is None:
            self._planned = ScheduledTensor(self._lr_of, self._parameters[0].device)
            self._optimizer._warned_capturable_if_run_uncaptured = True  # torch would warn of the steps before a recording
            for parameter, state in self._optimizer.state.items():  # restored ones may count their steps on the CPU
                state["step"] = state["step"].to(parameter.device)
        self._planned.plan(self._updates, count)
        self._updates += count

    def minimise(self, total: int, loss_of: Callable[[slice | None], Loss]) -> tuple[Loss, Tensor, Any]:
        """Step once down the loss of a batch of `total` windows. Returns that loss, and what `apply` returns.

        `loss_of` gives the loss of some of the windows, or with None of all: all at once, or where they do not fit into the GPU's memory
        and learner.shrink_batch is on (core/learning/microbatches.py) part by part.
        """
        def differentiate(part: slice | None) -> Loss:
            found = loss_of(part)
            self._optimizer.zero_grad(set_to_none=True)
            found.loss.backward()
            return found._replace(loss=found.loss.detach())

        found = self.gradient_of(total, differentiate)
        return found, *self.apply(found.loss)

    def gradient_of(self, total: int, differentiate: Differentiate) -> Loss:
        """Fill the gradients by that of a batch of `total` windows; as `minimise`, where something else than autograd fills them."""
        return gradient_of(self._parameters, total, self._sums, differentiate)

    def step(self, loss: Tensor, wanted: Any = True) -> tuple[Tensor, Any]:
        """Backpropagate, then `apply`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return self.apply(loss, wanted)

    def apply(self, loss: Tensor, wanted: Any = True) -> tuple[Tensor, Any]:
        """Clip the gradient that is there, and step. Returns its norm before clipping and whether the step was taken: planned, as a tensor.

        A loss or gradient that is not finite, of any learner, changes nothing, and neither does a step that is not `wanted`, which may be
        what another step of the same update returned.
        """
        loss = loss.detach() if num_learners() == 1 else self._together(loss.detach())
        if self._params.clip_value:
            nn.utils.clip_grad_value_(self._parameters, self._params.clip_value)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True) if len(gradients) > 1 else torch.linalg.vector_norm(gradients[0])
        if self._params.clip_norm:
            nn.utils.clip_grads_with_norm_(self._parameters, self._params.clip_norm, norm, foreach=True)
        if self._planned is not None:
            return norm, self._step_if(torch.isfinite(norm + loss) & wanted)
        taken = bool(wanted) and math.isfinite(norm + loss)
        if taken:
            for group in self._optimizer.param_groups:
                group["lr"], group["capturable"] = self.lr, False
            self._optimizer.step()
        self._updates += 1
        return norm, taken

    @torch.no_grad()
    def _together(self, loss: Tensor) -> Tensor:
        """The gradients become those of all learners; returns their loss. A parameter without a gradient counts as having a zero one."""
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._parameters]
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
    def _step_if(self, wanted: Tensor) -> Tensor:
        """A planned step, which the device takes or not: fused Adam reads `found_inf`, which GradScaler gives it elsewhere; RMSprop's is
        put back."""
        assert self._planned is not None
        self._planned_lr = self._planned.take()
        for group in self._optimizer.param_groups:
            group["lr"], group["capturable"] = self._planned_lr, self._planned_lr.is_cuda
        if self._params.optimizer == "adam":
            self._optimizer.found_inf = (~wanted).to(torch.float32)  # type: ignore[attr-defined]
            self._optimizer.step()
            return wanted
        before = [tensor.clone() for tensor in self._tensors()]
        self._optimizer.step()
        for number, tensor in enumerate(self._tensors()):
            old = before[number] if number < len(before) else torch.zeros_like(tensor)  # the first step makes its state, of zeros
            torch.where(wanted, tensor, old, out=tensor)
        return wanted

    def _tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        state = [value for values in self._optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        return [*self._parameters, *state]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was learnt, not the settings: those are this start's."""
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group.update(self._optimizer.defaults)
        self._updates = state["updates"]
