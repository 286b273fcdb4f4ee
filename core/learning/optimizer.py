"""Step optimisers with learning-rate schedule, gradient clipping and averaging over learners, for every agent.

An optimiser calls `gradient_of`. Outside `use_microbatches` that is the gradient of the whole batch. Inside, a batch
that runs out of memory is halved until its microbatches fit. The optimiser steps after the last one, so the update
equals that of the whole batch: one step, one count, one clipped norm, one exchange between learners.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from core.common.console import log_to_stderr
from core.common.settings import frozen_dataclass
from core.distributed.learner_group import group_of_several
from core.learning.gradient_exchange import GradientExchange
from core.learning.radam import RAdam
from core.learning.rmsprop import RMSProp
from core.learning.schedules import SCHEDULES, ScheduledTensor

_MICROBATCHER: ContextVar["MicroBatcher | None"] = ContextVar("microbatcher", default=None)


class Loss(NamedTuple):
    """The loss of some windows of a batch, with its metrics.

    Metrics are accumulated over microbatches like the loss. If the loss is a mean over windows, every metric must be
    such a mean; if it is a sum, every metric must be such a sum.
    """

    loss: Tensor  # scalar
    statistics: dict[str, Tensor]  # scalars
    priorities: Tensor | None = None  # [B], non-negative


# Set the gradients to those of some windows of the batch, or of all windows if the argument is None.
Differentiate = Callable[[slice | None], Loss]


class MicroBatcher:
    """Accumulate gradients over microbatches of `size` windows, which is halved whenever one does not fit.

    `size` is 0 before the first batch.
    """

    def __init__(self) -> None:
        self.size = 0

    def gradient(
        self, parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate
    ) -> Loss:
        """Do what `gradient_of` does. Raises torch.OutOfMemoryError if a single window does not fit."""
        self.size = self.size or total
        while True:
            try:
                if self.size >= total:
                    return differentiate(None)
                return self._accumulate(parameters, total, sums, differentiate)
            except torch.OutOfMemoryError:
                if self.size == 1:
                    raise
            # Outside the except block, so that the error and the tensors in its frames are freed.
            self.size = -(-self.size // 2)
            torch.cuda.empty_cache()
            log_to_stderr(
                f"out of GPU memory: gradients of batches of {total} are computed from microbatches of "
                f"{self.size} windows from now on"
            )

    def _accumulate(
        self, parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate
    ) -> Loss:
        losses, gradients = [], dict[nn.Parameter, Tensor]()
        for start in range(0, total, self.size):
            part = slice(start, min(start + self.size, total))
            weight = 1.0 if sums else (part.stop - part.start) / total
            loss, statistics, priorities = differentiate(part)
            weighted = {name: value * weight for name, value in statistics.items()}
            losses.append(Loss(loss.detach() * weight, weighted, priorities))
            for parameter in parameters:
                if parameter in gradients and parameter.grad is not None:
                    gradients[parameter].add_(parameter.grad, alpha=weight)
                elif parameter.grad is not None:
                    gradients[parameter] = parameter.grad * weight
        for parameter, gradient in gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)  # in place, because it may be a view
        return _sum_losses(losses)


def gradient_of(parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate) -> Loss:
    """Set the gradients of the parameters to those of a batch, from microbatches if `use_microbatches` is active.

    Args:
        parameters: those whose gradients are set.
        total: windows of the batch.
        sums: the loss is a sum over the windows; else it is a mean.
        differentiate: sets the gradients to those of some windows.

    Returns:
        The loss of the batch.
    """
    microbatcher = _MICROBATCHER.get()
    if microbatcher is None:
        return differentiate(None)
    return microbatcher.gradient(parameters, total, sums, differentiate)


@contextmanager
def use_microbatches(microbatcher: MicroBatcher) -> Iterator[None]:
    """Let `gradient_of` compute gradients from microbatches that fit into memory."""
    token = _MICROBATCHER.set(microbatcher)
    try:
        yield
    finally:
        _MICROBATCHER.reset(token)


def _sum_losses(losses: Sequence[Loss]) -> Loss:
    statistics = {name: torch.stack([each.statistics[name] for each in losses]).sum(0) for name in losses[0].statistics}
    priorities = [each.priorities for each in losses if each.priorities is not None]
    total = torch.stack([each.loss for each in losses]).sum()
    return Loss(total, statistics, torch.cat(priorities) if priorities else None)


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


OptimizerName = Literal["adam", "radam", "rmsprop"]


@frozen_dataclass
class OptimizerParams:
    optimizer: OptimizerName = "adam"
    """Optimiser of the network."""
    learning_rate: float = Field(default=1e-4, gt=0, le=100)
    """Learning rate at the start."""
    optimizer_eps: float = Field(default=1.5e-4, gt=0, le=1)
    """Added to the root of Adam's second moment; for RMSProp see rmsprop_eps_in_root."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Weight of the L2 penalty on the parameters; 0 is off."""
    rmsprop_decay: float = Field(default=0.95, ge=0, le=1)
    """Decay of RMSProp's moments (Ape-X: 0.95, IMPALA: 0.99)."""
    rmsprop_centered: bool = True
    """Divide RMSProp's steps by the standard deviation (Ape-X: yes, IMPALA: no)."""
    rmsprop_eps_in_root: bool = True
    """Add optimizer_eps to RMSProp's moment under the root (Nature DQN, Ape-X, IMPALA); if False, to the root."""
    lr_schedule: Literal["constant", "linear", "polynomial", "step"] = "constant"
    """Schedule of the learning rate over the updates."""
    lr_end: float = Field(default=0.0, ge=0, le=100)
    """Learning rate that a schedule ends at."""
    lr_schedule_updates: int | None = Field(default=1_000_000, ge=1, le=10**12)
    """Updates that a schedule takes; for "step" those between two steps. None takes those of the whole run, which
    follow from steps or updates."""
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
        steps_per_update: steps of this optimiser in one update of the agent, which have one learning rate.
    """

    # Learning rates of the planned steps, and that of the current one.
    _planned: ScheduledTensor | None = None
    _planned_lr: Tensor

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        params: OptimizerParams,
        sums: bool = False,
        period: int = 1,
        steps_per_update: int = 1,
    ):
        self._parameters, self._params, self._sums, self._period = list(parameters), params, sums, period
        self._steps_per_update = steps_per_update
        if params.lr_schedule != "constant" and params.lr_schedule_updates is None:
            raise ValueError(f"lr_schedule={params.lr_schedule} needs lr_schedule_updates")
        self._exchange = GradientExchange(self._parameters)
        self._steps = 0
        self._optimizer: torch.optim.Optimizer
        if params.optimizer == "adam":
            self._optimizer = Adam(
                self._parameters,
                lr=params.learning_rate,
                eps=params.optimizer_eps,
                weight_decay=params.weight_decay,
                fused=True,
            )
        elif params.optimizer == "radam":
            self._optimizer = RAdam(
                self._parameters, lr=params.learning_rate, eps=params.optimizer_eps, weight_decay=params.weight_decay
            )
        else:
            self._optimizer = RMSProp(
                self._parameters,
                lr=params.learning_rate,
                decay=params.rmsprop_decay,
                eps=params.optimizer_eps,
                eps_in_root=params.rmsprop_eps_in_root,
                centered=params.rmsprop_centered,
                weight_decay=params.weight_decay,
            )

    @property
    def is_planned(self) -> bool:
        """Return True once steps are planned."""
        return self._planned is not None

    @property
    def lr(self) -> float:
        return self._lr_of(self._steps)

    @property
    def rate(self) -> Tensor:
        """Return the learning rate as a metric; for planned steps that of the current one, on the device."""
        return torch.tensor(self.lr) if self._planned is None else self._planned_lr

    def _lr_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, which is taken in the last update of its period."""
        params, update = self._params, (step // self._steps_per_update + 1) * self._period - 1
        return SCHEDULES[params.lr_schedule](
            update, params.learning_rate, params.lr_end, params.lr_schedule_updates or 1, params.lr_decay
        )

    def plan(self, count: int) -> None:
        """Plan the next `count` steps: their learning rates go to the device, and python reads no tensor in `step`."""
        if self._planned is None:
            self._planned = ScheduledTensor(self._lr_of, self._parameters[0].device)
            # Else torch warns about the steps before the capture.
            self._optimizer._warned_capturable_if_run_uncaptured = True
            for parameter, state in self._optimizer.state.items():
                if "step" in state:  # A restored optimiser may count its steps on the CPU.
                    state["step"] = state["step"].to(parameter.device)
        self._planned.plan(self._steps, count)
        self._steps += count

    def minimise(
        self, total: int, loss_of: Callable[[slice | None], Loss], apply_if: Any = True
    ) -> tuple[Loss, Tensor, Any]:
        """Step once to minimise the loss of a batch.

        Args:
            total: windows of the batch.
            loss_of: returns the loss of some of the windows or, given None, of all. With learner.microbatch_on_oom, a
            batch
                that exceeds the GPU's memory is differentiated part by part (core/learning/optimizer.py).
            apply_if: as in `apply`.

        Returns:
            The loss of the batch, and what `apply` returns.
        """

        def differentiate(part: slice | None) -> Loss:
            loss = loss_of(part)
            self._clear_gradients()
            # A pass that may run out of memory is not overlapped, because no bucket may be sent twice.
            with self._exchange.overlapped() if _MICROBATCHER.get() is None else nullcontext():
                loss.loss.backward()
            return loss._replace(loss=loss.loss.detach())

        loss = self.gradient_of(total, differentiate)
        return loss, *self.apply(loss.loss, apply_if)

    def skip(self, count: int) -> None:
        """Count steps that are not taken. Planned steps are skipped by `apply_if`."""
        self._steps += count

    def gradient_of(self, total: int, differentiate: Differentiate) -> Loss:
        """Set the gradients to those of a batch of `total` windows, computed by `differentiate`."""
        return gradient_of(self._parameters, total, self._sums, differentiate)

    def step(self, loss: Tensor, apply_if: Any = True) -> tuple[Tensor, Any]:
        """Backpropagate, then `apply`."""
        self._clear_gradients()
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
        loss = loss.detach()
        if learners := group_of_several():
            loss = self._exchange.finish(learners, loss, 1 if self._sums else learners.size)
        if self._params.clip_value:
            nn.utils.clip_grad_value_(self._parameters, self._params.clip_value)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # As torch.nn.utils.clip_grad_norm_ computes it, which sorts the gradients by device and dtype first.
        norms = torch._foreach_norm(gradients)
        norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
        if self._params.clip_norm:
            torch._foreach_mul_(gradients, (self._params.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self._planned is not None:
            return norm, self._apply_planned(torch.isfinite(norm + loss) & apply_if)
        applied = bool(apply_if) and math.isfinite(norm + loss)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"], group["capturable"] = self.lr, False
            self._optimizer.step()
            increment_version(self._parameters)  # which fused optimisers do not
        self._steps += 1
        return norm, applied

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _apply_planned(self, apply_if: Tensor) -> Tensor:
        """Take a planned step, which the device applies or not.

        Fused Adam skips its step if `found_inf` is set, which is how GradScaler uses it. A skipped step of another
        optimiser is undone.
        """
        assert self._planned is not None
        self._planned_lr = self._planned.take()
        for group in self._optimizer.param_groups:
            group["lr"], group["capturable"] = self._planned_lr, self._planned_lr.is_cuda
        if self._params.optimizer == "adam":
            self._optimizer.found_inf = (~apply_if).to(torch.float32)  # type: ignore[attr-defined]
            self._optimizer.step()
            increment_version(self._parameters)  # which fused optimisers do not
            return apply_if
        before = [tensor.clone() for tensor in self._tensors()]
        self._optimizer.step()
        for old, tensor in zip(before, self._tensors(), strict=True):
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
