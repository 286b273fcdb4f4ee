"""Compute the gradient of a batch that exceeds the GPU's memory from microbatches.

An optimiser (core/learning/optimizer.py) calls `gradient_of`. Outside `use_microbatches` that is the gradient of the
whole batch. Inside, a batch that runs out of memory is halved until its microbatches fit. The optimiser steps after the
last one, so the update equals that of the whole batch: one step, one count, one clipped norm, one exchange between
learners.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.common.console import log_to_stderr

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
