"""Step optimisers and target networks, by numbers that change from update to update.

Planned updates read such numbers (learning rates, whether a target network is due) from device tensors, because a CUDA
graph runs no python.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from core.common.settings import frozen_dataclass
from core.device.torch_runtime import upload
from core.distributed.learner_group import group_of_several
from core.learning.gradients import MICROBATCHER, Differentiate, GradientExchange, Loss
from core.learning.torch_optimizers import Adam, RAdam, RMSProp
from core.types import check_scalar

NO_GRADIENT = (
    "the loss gave no parameter of this optimiser a gradient. Those of DDPG, D4PG, TD3 and SAC step one vector: "
    "`vectors = self.online_vectors`, then `vectors.differentiate(loss, vectors.critic)` and "
    "`self.critic_optimizer.apply(loss)`, not `step` or `minimise`. `policy_loss` reaches the policy "
    "alone: a learnt scalar needs a loss and an optimiser of its own, as SAC's temperature"
)
OptimizerName = Literal["adam", "radam", "rmsprop"]


@frozen_dataclass
class OptimizerParams:
    optimizer: OptimizerName = "adam"
    """Optimiser of the network."""
    learning_rate: float = Field(default=1e-4, gt=0, le=100)
    """Learning rate at the start."""
    optimizer_eps: float = Field(default=1e-8, gt=0, le=1)
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
    """Schedule of the learning rate."""
    lr_end: float = Field(default=0.0, ge=0, le=100)
    """Learning rate that a schedule ends at."""
    lr_schedule_updates: int | None = Field(default=1_000_000, ge=1, le=10**12)
    """Updates that a schedule takes; for "step" those between two steps. None lets it follow the
    whole run, by the share of steps or updates that is over."""
    lr_decay: float = Field(default=0.5, gt=0, le=100)
    """Factor of schedule "step", exponent of schedule "polynomial"."""
    clip_norm: float = Field(default=0.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; 0 is off."""
    clip_value: float = Field(default=0.0, ge=0, le=1e9)
    """Largest size of each element of the gradient; 0 is off."""


def learning_rate(params: OptimizerParams, update: int, run_progress: float = 0.0) -> float:
    """Return the learning rate of an update.

    Args:
        params: Options of the schedule.
        update: Number of the update, counted from 0.
        run_progress: Share of the run that is over, 0 to 1, which a schedule without lr_schedule_updates follows.
    """
    start, end, updates = params.learning_rate, params.lr_end, params.lr_schedule_updates
    match params.lr_schedule:
        case "constant":
            return start
        case "step":
            assert updates is not None
            return max(start * params.lr_decay ** (update // updates), end)
    exponent = 1.0 if params.lr_schedule == "linear" else params.lr_decay
    progress = run_progress if updates is None else min(update / updates, 1.0)
    return end + (start - end) * float((1 - progress) ** exponent)


class ScheduledTensor:
    """Hold value(update) of the next updates in a device tensor.

    The tensor stays the same, so that captured kernels read new values. `plan` computes the values in python and copies
    them at once; then each update takes its own.
    """

    def __init__(self, value: Callable[[int], float], device: torch.device, dtype: torch.dtype = torch.float32):
        self._value, self._device, self._dtype = value, device, dtype
        self._values: Tensor | None = None  # [count]
        self._planned: list[float] = []  # what `_values` holds
        self._next = 0

    def plan(self, first: int, count: int) -> None:
        """Compute the values of updates first .. first + count - 1.

        Raises:
            ValueError: `count` differs from that of the first call.
        """
        if self._values is None:
            self._values = torch.zeros(count, dtype=self._dtype, device=self._device)
        if len(self._values) != count:
            raise ValueError(f"{count} updates are planned where {len(self._values)} were planned before")
        values = [self._value(update) for update in range(first, first + count)]
        if values != self._planned:  # a constant learning rate is copied once
            upload(torch.tensor(values, dtype=self._dtype), self._values)
            self._planned = values
        self._next = 0

    def take(self) -> Tensor:
        """Return the scalar of the next update."""
        assert self._values is not None, "nothing was planned"
        value = self._values[self._next]
        self._next = (self._next + 1) % len(self._values)
        return value


class Optimizer:
    """An optimiser with everything that belongs to its step.

    Several learners step with the gradient of all their batches: the mean of their gradients or, with `sums`, the sum.
    So n batches of B windows give the step of one batch of n B.

    Once steps are planned (`plan`), python reads no tensor in them, so that they can be captured as a CUDA graph.

    Args:
        parameters: those to change; fixed ones (`requires_grad` False) are left out.
        params: options of the optimiser.
        sums: losses are sums over the windows of a batch; else they are means.
        period: updates of the agent for one step of this optimiser. Schedules count updates.
        steps_per_update: steps of this optimiser in one update of the agent, which have one learning rate.
        run_progress: returns the share of the run that is over, for a schedule of the whole run.

    Raises:
        ValueError: the schedule has no lr_schedule_updates, and "step" or a missing `run_progress` needs them.
    """

    # Steps taken or skipped. `apply` counts them in Python, which a graph launch does not run, so `plan` catches up.
    steps_begun = 0
    _planned: ScheduledTensor | None = None  # learning rates of the planned steps
    _last_lr: float | Tensor  # of the last step; of a planned one on the device

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        params: OptimizerParams,
        sums: bool = False,
        period: int = 1,
        steps_per_update: int = 1,
        run_progress: Callable[[], float] | None = None,
    ):
        # Fixed ones have no gradient, which the exchange would wait for; its zeros would let weight decay change them.
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._params, self._sums, self._period = params, sums, period
        self._steps_per_update, self._run_progress = steps_per_update, run_progress or (lambda: 0.0)
        needs_updates = params.lr_schedule == "step" or (params.lr_schedule != "constant" and run_progress is None)
        if needs_updates and params.lr_schedule_updates is None:
            way = "" if params.lr_schedule == "step" else ", or run_progress to follow the whole run"
            raise ValueError(f"lr_schedule={params.lr_schedule} needs lr_schedule_updates{way}")
        self._steps = 0  # taken, skipped and planned ones
        self._optimizer: torch.optim.Optimizer
        settings = {"lr": params.learning_rate, "eps": params.optimizer_eps, "weight_decay": params.weight_decay}
        match params.optimizer:
            case "adam":
                self._optimizer = Adam(self._parameters, fused=True, **settings)  # type: ignore[arg-type]
            case "radam":
                self._optimizer = RAdam(self._parameters, **settings)
            case "rmsprop":
                self._optimizer = RMSProp(
                    self._parameters,
                    decay=params.rmsprop_decay,
                    eps_in_root=params.rmsprop_eps_in_root,
                    centered=params.rmsprop_centered,
                    **settings,
                )

    @cached_property
    def _exchange(self) -> GradientExchange:
        return GradientExchange(self._parameters)

    @property
    def is_planned(self) -> bool:
        """Return True once steps are planned."""
        return self._planned is not None

    @property
    def next_lr(self) -> float:
        """Return the learning rate of the next step."""
        return self._lr_of(self._steps)

    @property
    def last_lr(self) -> Tensor:
        """Return the learning rate of the last step as a metric; that of a planned step is on the device."""
        return torch.as_tensor(self._last_lr)

    def _lr_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, which is taken in the last update of its period."""
        update = (step // self._steps_per_update + 1) * self._period - 1
        return learning_rate(self._params, update, self._run_progress())

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
        self.steps_begun, self._steps = self._steps, self._steps + count

    def minimise(
        self, total: int, loss_of: Callable[[slice | None], Loss], apply_if: Any = True
    ) -> tuple[Loss, Tensor, Any]:
        """Step once to minimise the loss of a batch.

        Args:
            total: windows of the batch.
            loss_of: returns the loss of some of the windows or, given None, of all. With learner.microbatch_on_oom, a
                batch that exceeds the GPU's memory is differentiated part by part (core/learning/gradients.py).
            apply_if: as in `apply`.

        Returns:
            The loss of the batch, and what `apply` returns.

        Raises:
            TypeError: `loss_of` returns something else than a Loss.
            ValueError: its loss is no scalar tensor.
        """

        def differentiate(part: slice | None) -> Loss:
            loss = loss_of(part)
            if not isinstance(loss, Loss):
                raise TypeError(f"a loss is of {type(loss)}, expected core.learning.gradients.Loss")
            check_scalar("the loss of a batch", loss.loss)
            self._clear_gradients()
            # A pass that may run out of memory is not overlapped, because no bucket may be sent twice.
            group = group_of_several() if MICROBATCHER.get() is None else None
            with self._exchange.overlapped(group) if group else nullcontext():
                loss.loss.backward()
            return loss._replace(loss=loss.loss.detach())

        loss = self.set_gradients(total, differentiate)
        return loss, *self.apply(loss.loss, apply_if)

    def skip(self, count: int) -> None:
        """Count steps that are not taken. Planned steps are skipped by `apply_if`."""
        self._steps += count
        self.steps_begun += count

    def set_gradients(self, total: int, differentiate: Differentiate) -> Loss:
        """Set the gradients to those of a batch of `total` windows, computed by `differentiate`.

        While MICROBATCHER is set, they are computed from microbatches if the whole batch does not fit.
        """
        if (microbatcher := MICROBATCHER.get()) is None:
            return differentiate(None)
        return microbatcher.set_gradients(self._parameters, total, self._sums, differentiate)

    def step(self, loss: Tensor, apply_if: Any = True) -> tuple[Tensor, Any]:
        """Backpropagate, then `apply`."""
        self._clear_gradients()
        loss.backward()
        return self.apply(loss, apply_if)

    def apply(self, loss: Tensor, apply_if: Any = True) -> tuple[Tensor, Any]:
        """Clip the current gradients and step, unless the loss or gradient of any learner is not finite.

        Elements are clipped before the norm, by `clip_value` and `clip_norm`.

        Args:
            loss: scalar, only tested for being finite.
            apply_if: skip the step if false; for planned steps a tensor, such as another step of the same update
                returned.

        Returns:
            The gradient's norm before clipping, and whether the step was applied; a tensor if the step was planned.

        Raises:
            ValueError: no parameter has a gradient.
        """
        loss = loss.detach()
        self.steps_begun += 1
        if group := group_of_several():
            loss = self._exchange.finish(group, loss, 1 if self._sums else group.size)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            raise ValueError(NO_GRADIENT)
        norm = clipped_norm = _norm_of(gradients)
        if self._params.clip_value:
            nn.utils.clip_grad_value_(self._parameters, self._params.clip_value)
            clipped_norm = _norm_of(gradients)
        if self._params.clip_norm:
            scale = (self._params.clip_norm / (clipped_norm + 1e-6)).clamp(max=1.0)
            if self.is_planned or scale < 1:
                torch._foreach_mul_(gradients, scale)
        if self._planned is not None:
            return norm, self._apply_planned(torch.isfinite(norm + loss) & apply_if)
        self._last_lr, applied = self.next_lr, bool(apply_if) and math.isfinite(norm + loss)
        if applied:
            for settings in self._optimizer.param_groups:
                settings["lr"], settings["capturable"] = self._last_lr, False
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
        self._last_lr = lr = self._planned.take()
        for group in self._optimizer.param_groups:
            group["lr"], group["capturable"] = lr, lr.is_cuda
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
        steps_per_update = self._steps_per_update / self._period
        return {"optimizer": self._optimizer.state_dict(), "updates": self._steps, "steps_per_update": steps_per_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments, and how many updates of the agent were made. Settings stay those of this start."""
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group.update(self._optimizer.defaults)
        ratio = self._steps_per_update / self._period / state["steps_per_update"]
        self._steps = self.steps_begun = round(state["updates"] * ratio)


def _norm_of(gradients: list[Tensor]) -> Tensor:
    """Return the norm of the whole gradient, as `clip_grad_norm_` of torch does, which sorts the gradients first."""
    norms = torch._foreach_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


class TargetUpdater:
    """Move a target network's tensors towards those of the online network.

    - Every `period` updates, target += tau * (online - target); with tau = 1 the target becomes a copy.
    - The updater is called after every `updates_per_call` updates. If the optimiser skipped its step, the target stays.
    """

    # Whether an update of the target is due, for each of the planned calls.
    _due: ScheduledTensor | None = None

    def __init__(self, period: int, tau: float = 1.0, updates_per_call: int = 1):
        self._period, self._tau, self._updates_per_call = period, tau, updates_per_call

    def may_move(self, update: int, applied: bool | Tensor) -> bool:
        """Return False if the call after this update, which counts from 1, leaves the target as it is."""
        return self._due is not None or bool(applied and self._is_due(update))

    def _is_due(self, update: int) -> bool:
        """Return True if an update of the target became due since the last call."""
        return update // self._period > (update - self._updates_per_call) // self._period

    def plan(self, first: int, count: int, device: torch.device) -> None:
        """Plan the next `count` calls, which come after updates first, first + updates_per_call, and so on.

        From now on the device decides whether an update of the target is due.
        """
        if self._due is None:
            self._due = ScheduledTensor(lambda call: self._is_due(call * self._updates_per_call), device, torch.bool)
        self._due.plan(first // self._updates_per_call, count)

    @torch.no_grad()
    def __call__(
        self,
        target: nn.Module | list[Tensor],
        online: nn.Module | list[Tensor],
        update: int,
        applied: bool | Tensor = True,
    ) -> bool | Tensor:
        """Update the target after update number `update`, or after the next planned one.

        Args:
            target: a network, or tensors that hold all its parameters and buffers, which are changed in place.
            online: the same of the online network.
            update: number of the update, from 1; ignored if updates are planned.
            applied: the optimiser stepped; a tensor if the update was planned.

        Returns:
            True if the target moved; a tensor if the update was planned.
        """
        if not self.may_move(update, applied):
            return False
        tensors, new_tensors = (
            list(each.state_dict().values()) if isinstance(each, nn.Module) else each for each in (target, online)
        )
        if self._tau < 1:  # integers, such as BatchNorm's number of batches, stay as they are
            tensors, new_tensors = (
                [each for each in part if each.is_floating_point()] for part in (tensors, new_tensors)
            )
        if self._due is not None:
            due = self._due.take() & applied
            if self._tau < 1:
                torch._foreach_lerp_(tensors, new_tensors, [due * self._tau] * len(tensors))
            else:
                for tensor, new in zip(tensors, new_tensors):
                    torch.where(due, new, tensor, out=tensor)
            return due
        if self._tau < 1:
            torch._foreach_lerp_(tensors, new_tensors, self._tau)
        else:
            torch._foreach_copy_(tensors, new_tensors)
        return True
