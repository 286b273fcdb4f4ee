"""Gradients of batches that do not fit into the GPU's memory: taken of pieces one after another, and added up.

Whatever steps (core/learning/optimizer.py) asks here for the gradient of a batch. Outside `in_pieces` that is the whole batch's, and
nothing is copied. Inside, a batch that runs out of memory is halved until its pieces fit; the step comes after the last one, so that an
update in pieces is the update of the whole batch: one step, one count, one norm that is clipped, one exchange of several learners.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.common.console import log_to_stderr

_PIECES: ContextVar["Pieces | None"] = ContextVar("pieces", default=None)


class Loss(NamedTuple):
    """The loss of some windows of a batch, and what is reported of them.

    Pieces of a batch are put together as their losses are: of a loss that is a mean over the windows every statistic must be such a mean,
    of a loss that is a sum every statistic must be such a sum.
    """

    loss: Tensor                     # scalar
    statistics: dict[str, Tensor]    # scalars
    priorities: Tensor | None = None  # [B], non-negative


Differentiate = Callable[[slice | None], Loss]  # fills the gradients by those of these windows, or by those of all


class Pieces:
    """How many windows of a batch are differentiated at once: all, until they do not fit."""

    def __init__(self) -> None:
        self.size = 0  # windows; 0: no batch has been seen yet

    def gradient(self, parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate) -> Loss:
        """As `gradient_of`. Raises torch.OutOfMemoryError where a single window does not fit."""
        self.size = self.size or total
        while True:
            try:
                return differentiate(None) if self.size >= total else self._added_up(parameters, total, sums, differentiate)
            except torch.OutOfMemoryError:
                if self.size == 1:
                    raise
            self._halve(total)  # the error is forgotten, and with it the tensors of its frames

    def _added_up(self, parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate) -> Loss:
        losses, gradients = [], dict[nn.Parameter, Tensor]()
        for start in range(0, total, self.size):
            part = slice(start, min(start + self.size, total))
            share = 1.0 if sums else (part.stop - part.start) / total
            loss, statistics, priorities = differentiate(part)
            losses.append(Loss(loss.detach() * share, {name: value * share for name, value in statistics.items()}, priorities))
            for parameter in parameters:
                if parameter in gradients and parameter.grad is not None:
                    gradients[parameter].add_(parameter.grad, alpha=share)
                elif parameter.grad is not None:
                    gradients[parameter] = parameter.grad * share
        for parameter, gradient in gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)  # in place: it may be a view
        return _together(losses)

    def _halve(self, total: int) -> None:
        self.size = -(-self.size // 2)
        torch.cuda.empty_cache()
        log_to_stderr(f"out of GPU memory: gradients of batches of {total} are taken of {self.size} windows at a time from now on")


def gradient_of(parameters: Sequence[nn.Parameter], total: int, sums: bool, differentiate: Differentiate) -> Loss:
    """Fill the gradients of the parameters by that of the loss of a batch of `total` windows, and return the batch's loss.

    The loss is a mean over the windows, or with `sums` a sum.
    """
    pieces = _PIECES.get()
    return differentiate(None) if pieces is None else pieces.gradient(parameters, total, sums, differentiate)


@contextmanager
def in_pieces(pieces: Pieces) -> Iterator[None]:
    """Take gradients of pieces that fit."""
    token = _PIECES.set(pieces)
    try:
        yield
    finally:
        _PIECES.reset(token)


def _together(losses: Sequence[Loss]) -> Loss:
    """Sums of what has been weighted already."""
    statistics = {name: torch.stack([each.statistics[name] for each in losses]).sum(0) for name in losses[0].statistics}
    priorities = [each.priorities for each in losses if each.priorities is not None]
    return Loss(torch.stack([each.loss for each in losses]).sum(), statistics, torch.cat(priorities) if priorities else None)
