"""Compute the gradient of a batch: whole or from microbatches, and summed with those of other learners.

While MICROBATCHER is set, a batch that runs out of memory is halved until its microbatches fit. The optimiser steps
after the last one, so the update equals that of the whole batch: one step, one count, one clipped norm, one exchange
between learners.

Several learners exchange gradients in buckets, while the backward pass computes the rest.

- A backward pass fills gradients from the last layer to the first. Buckets therefore take the parameters in reverse.
  Each is sent as soon as its last gradient is there. The rest goes with the loss, after the backward pass.
- All learners send the same buckets in the same order, also those whose gradients come from microbatches or by hand.
- A bucket of one gradient is summed in place. Buckets of several are copied into one tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.common.console import log_to_stderr
from core.distributed.learner_group import LearnerGroup

BUCKET_BYTES = 1 << 20  # of gradients from which a bucket is sent; smaller ones cost more messages than they hide
MICROBATCHER: ContextVar["MicroBatcher | None"] = ContextVar("microbatcher", default=None)


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

    def set_gradients(
        self, parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate
    ) -> Loss:
        """Set the gradients of the parameters to those of a batch.

        Args:
            parameters: those whose gradients are set.
            total: windows of the batch.
            sums: the loss is a sum over the windows; else it is a mean.
            differentiate: sets the gradients to those of some windows.

        Returns:
            The loss of the batch.

        Raises:
            torch.OutOfMemoryError: a single window does not fit.
        """
        self.size = self.size or total
        while True:
            try:
                if self.size >= total:
                    return differentiate(None)
                return self._accumulate(parameters, total, sums, differentiate)
            except torch.OutOfMemoryError:
                self.size = min(self.size, total)  # an earlier batch may have been larger
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
        summed = {name: torch.stack([each.statistics[name] for each in losses]).sum(0) for name in losses[0].statistics}
        computed = [each.priorities for each in losses if each.priorities is not None]
        total_loss = torch.stack([each.loss for each in losses]).sum()
        return Loss(total_loss, summed, torch.cat(computed) if computed else None)


class GradientExchange:
    """Exchange of the gradients of some parameters and their loss."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        # The parameters in reverse, in buckets of at least BUCKET_BYTES, and the rest, which may be empty.
        self._buckets, size = [list[nn.Parameter]()], 0
        for parameter in reversed(parameters):
            self._buckets[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= BUCKET_BYTES:
                self._buckets.append([])
                size = 0
        self._number_of = {parameter: number for number, each in enumerate(self._buckets) for parameter in each}
        # Gradients on their way, and the flat tensor that is sent; it shares the memory of a single gradient.
        self._sent: list[tuple[list[Tensor], Tensor]] = []

    @contextmanager
    def overlapped(self, group: LearnerGroup) -> Iterator[None]:
        """Send each bucket during the one backward pass in this context."""
        self._sent, missing = [], [len(bucket) for bucket in self._buckets]

        def on_gradient(parameter: Tensor) -> None:
            missing[self._number_of[parameter]] -= 1  # type: ignore[index]
            while missing[len(self._sent)] == 0 and len(self._sent) < len(missing) - 1:
                self._send(group)

        hooks = [
            parameter.register_post_accumulate_grad_hook(on_gradient)
            for bucket in self._buckets[:-1]
            for parameter in bucket
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def finish(self, group: LearnerGroup, loss: Tensor, divisor: int) -> Tensor:
        """Replace gradients by the sum of all learners' over the divisor. A missing gradient counts as zero.

        Returns:
            The loss, summed and divided likewise.
        """
        while len(self._sent) < len(self._buckets) - 1:
            self._send(group)
        loss = loss.clone()  # because it is summed in place
        self._send(group, loss)
        group.finish_sums()
        for gradients, flat in self._sent:
            if flat.data_ptr() != gradients[0].data_ptr():
                parts = flat.split([gradient.numel() for gradient in gradients])
                torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients)])
            if divisor != 1:
                torch._foreach_div_(gradients, divisor)
        self._sent = []
        return loss

    @torch.no_grad()
    def _send(self, group: LearnerGroup, *others: Tensor) -> None:
        """Send the next bucket, with other tensors."""
        bucket = self._buckets[len(self._sent)]
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [*(parameter.grad for parameter in bucket if parameter.grad is not None), *others]
        parts = [gradient.reshape(-1).to(group.gradient_dtype or gradient.dtype) for gradient in gradients]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        group.start_sum(flat)
        self._sent.append((gradients, flat))
