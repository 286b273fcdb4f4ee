"""Hold the newest parameters of the network in shared memory: a learner publishes them, others pull them."""

import numpy as np
import torch
from torch import Tensor, nn

from core.common.shared_arrays import SharedArrays
from core.device.torch_runtime import on_device
from core.specs import ArraySpec


class ParameterStore:
    """Share the floating-point parameters and buffers of a model between one writer and any number of readers.

    In version 0 nothing is published yet.

    There are no locks and no torn reads. The store has two buffers of flat float32 and two counters. The writer
    announces version v + 1, fills the buffer that v does not use, then declares v + 1 complete. A reader copies the
    newest complete buffer. The copy is valid unless the writer has meanwhile announced the version after the next,
    which reuses that buffer; then the reader copies again. This relies on stores becoming visible in program order
    (x86).
    """

    def __init__(self, size: int):
        counter = ArraySpec((1,), "int64")
        buffers = ArraySpec((2, size), "float32")
        self._arrays = SharedArrays({"buffers": buffers, "announced": counter, "complete": counter})

    @staticmethod
    def size_of(model: nn.Module) -> int:
        """Return the number of floats that a model needs."""
        return sum(tensor.numel() for tensor in _float_tensors(model))

    @property
    def size(self) -> int:
        """Return the number of floats of a version."""
        return int(self._arrays["buffers"].shape[1])

    @property
    def version(self) -> int:
        return int(self._arrays["complete"][0])

    @torch.no_grad()
    def publish(self, model: nn.Module, version: int | None = None) -> int:
        """Publish the model's parameters and buffers, and return their version.

        The version is the next one, unless a resumed run gives that of its checkpoint.
        """
        version = self.version + 1 if version is None else version
        self._arrays["announced"][0] = version
        buffer = torch.from_numpy(self._arrays["buffers"][version % 2])
        # `reshape` orders elements by index, whatever the memory format. Another device sends them in one transfer.
        parts = [tensor.reshape(-1) for tensor in _float_tensors(model)]
        torch.cat(parts, out=buffer) if parts[0].device == buffer.device else buffer.copy_(torch.cat(parts))
        self._arrays["complete"][0] = version
        return version

    def pull(self, model: nn.Module, known_version: int) -> int:
        """Update the model if a version other than known_version is published. Return the version that it now has."""
        if self.version == known_version:
            return known_version
        version, values = self.read()
        fill(model, values)
        return version

    def read(self) -> tuple[int, np.ndarray]:
        """Return the newest version and a copy of its values, flat float32."""
        while True:
            version = self.version
            values = self._arrays["buffers"][version % 2].copy()
            if self._arrays["announced"][0] <= version + 1:
                return version, values


@torch.no_grad()
def fill(model: nn.Module, values: np.ndarray) -> None:
    """Copy values, as `ParameterStore.read` returns them, into the model's tensors in place."""
    tensors = _float_tensors(model)
    flat = on_device(values, tensors[0].device)
    # One tensor at a time, because channels_last tensors have no flat view.
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view(tensor.shape))


def _float_tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
