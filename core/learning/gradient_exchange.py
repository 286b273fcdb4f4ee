"""Exchange the gradients of several learners in buckets, while the backward pass computes the rest.

- A backward pass fills gradients from the last layer to the first. Buckets therefore take the parameters in reverse.
  Each is sent as soon as its last gradient is there. The rest goes with the loss, after the backward pass.
- All learners send the same buckets in the same order, also those whose gradients come from microbatches or by hand.
- A bucket of one gradient is summed in place. Buckets of several are copied into one tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.distributed.learner_group import LearnerGroup, group_of_several

BUCKET_BYTES = 1 << 20  # of gradients from which a bucket is sent; smaller ones cost more messages than they hide


class Bucket(NamedTuple):
    """Gradients on their way, and the flat tensor that is sent; it shares the memory of a single gradient."""

    gradients: list[Tensor]
    flat: Tensor


class GradientExchange:
    """Exchange of the gradients of some parameters and their loss."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._buckets = _make_buckets(parameters)
        self._number_of = {parameter: number for number, each in enumerate(self._buckets) for parameter in each}
        self._sent: list[Bucket] = []

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Send each bucket during the one backward pass in this context. Outside of a group, do nothing."""
        group = group_of_several()  # not looked up in a hook, which on CUDA runs on a thread of autograd
        self._sent, missing = [], [len(bucket) for bucket in self._buckets]
        if group is None or len(missing) == 1:
            yield
            return

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
        self._sent.append(Bucket(gradients, flat))


def _make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in reverse, in buckets of at least BUCKET_BYTES, and the rest, which may be empty."""
    buckets, size = [list[nn.Parameter]()], 0
    for parameter in reversed(parameters):
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
    return buckets
