"""The shared model parameters: one writer, any number of readers, no lock, no torn read.

Two halves of flat float32 and two counters. The writer announces version v + 1, fills the half that v does not use, then declares
it complete. A reader copies the newest complete half and is safe as long as the writer has not announced the version
after the next, which would reuse that half; otherwise it copies again. Relies on stores becoming visible in program order (x86).
"""

import numpy as np
import torch
from torch import Tensor, nn

from core.common.shared_arrays import SharedArrays
from core.device.transfers import on_device
from core.specs import ArraySpec


class ParameterStore:
    """Holds the floating-point state of models of one shape. Version 0 means: nothing published yet."""

    def __init__(self, size: int):
        self._arrays = SharedArrays({"halves": ArraySpec((2, size), "float32"), "announced": ArraySpec((1,), "int64"),
                                     "complete": ArraySpec((1,), "int64")})

    @staticmethod
    def size_of(model: nn.Module) -> int:
        """Floats a model needs."""
        return sum(tensor.numel() for tensor in _floats(model))

    @property
    def version(self) -> int:
        return int(self._arrays["complete"][0])

    def publish(self, model: nn.Module, version: int | None = None) -> int:
        """Copy the model's parameters and buffers out. Returns their version, one more than before unless given (resume).

        Raises ValueError for a version that does not rise: readers could not tell it from the last one.
        """
        version = self.version + 1 if version is None else version
        if version <= self.version:
            raise ValueError(f"version {version} must be greater than the published {self.version}")
        self._arrays["announced"][0] = version
        half = torch.from_numpy(self._arrays["halves"][version % 2])
        _gather(_floats(model), half)
        self._arrays["complete"][0] = version
        return version

    def pull(self, model: nn.Module, known_version: int) -> int:
        """Bring the model up to date if there is anything newer than known_version. Returns the version it now holds."""
        if self.version == known_version:
            return known_version
        version, values = self.read()
        fill(model, values)
        return version

    def read(self) -> tuple[int, np.ndarray]:
        """The newest version and a copy of its values, flat float32."""
        while True:
            version = self.version
            values = self._arrays["halves"][version % 2].copy()
            if self._arrays["announced"][0] <= version + 1:
                return version, values


def fill(model: nn.Module, values: np.ndarray) -> None:
    """Give a model, whose tensors stay where they are, the values that `ParameterStore.read` returned; they are only read."""
    tensors = _floats(model)
    _scatter(on_device(values, tensors[0].device), tensors)


def _floats(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]


@torch.no_grad()
def _gather(tensors: list[Tensor], flat: Tensor) -> None:
    """In one copy, also from another device."""
    parts = [tensor.reshape(-1) for tensor in tensors]  # in the order of indices, whatever the layout
    if parts[0].device == flat.device:
        torch.cat(parts, out=flat)
    else:
        flat.copy_(torch.cat(parts))


@torch.no_grad()
def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    """One by one: channels_last tensors have no flat view."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view(tensor.shape))
