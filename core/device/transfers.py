"""Host-to-device copies, identical in interface on CPU and CUDA. Lines that only CUDA knows are here and in cuda_graph.py."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from core.common.console import log_to_stderr
from core.common.shared_arrays import SharedArrays

_PINNED: weakref.WeakSet[SharedArrays] = weakref.WeakSet()  # registered with CUDA


def upload(array: np.ndarray | Tensor, target: Tensor) -> None:
    """Copy an array into a tensor of its shape, in turn with what else the device was given to do. The array may change afterwards.

    CUDA: by way of pinned memory, so that python does not wait; torch's allocator of pinned memory reuses it once the copy is through.
    """
    source = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    target.copy_(_staged(source) if target.is_cuda else source, non_blocking=True)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array there, on a CPU itself and no copy. CUDA: as `upload`, in one copy, and python does not wait."""
    source = torch.from_numpy(array)
    return source if device.type == "cpu" else _staged(source).to(device, non_blocking=True)


def _staged(source: Tensor) -> Tensor:
    """A copy in pinned memory, also of what is pinned already: that may change before the device has read it."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)


class Transfers:
    """Copies of shared memory to a device.

    CUDA: the memory is registered as pinned, so that the device reads it where it is, on a stream beside its other work. Where that is
    refused, and on a CPU, each copy is an `upload`.
    """

    def __init__(self, shared: SharedArrays, device: torch.device):
        registered = device.type == "cuda" and _register(shared, device)
        self._stream = torch.cuda.Stream(device) if registered else None
        self._memory = shared.whole
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which may be filling the tensors with zeros

    @contextmanager
    def together(self, after_work: bool) -> Iterator[Callable[[np.ndarray, Tensor], None]]:
        """Gives what copies an array into a tensor of its shape. When this is over arrays may change, and the device's work sees all.

        `after_work`: they must not change before all is done that the device was given.
        """
        if self._stream is None:
            yield upload
            return
        if after_work:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield self._copy_from_where_it_is
        self._stream.synchronize()

    def _copy_from_where_it_is(self, array: np.ndarray, target: Tensor) -> None:
        """Except what was made for this copy alone, as unpacked frames are: it may be gone before the device has read it."""
        if np.may_share_memory(array, self._memory):
            target.copy_(torch.from_numpy(array), non_blocking=True)
        else:
            upload(array, target)


def _register(shared: SharedArrays, device: torch.device) -> bool:
    """Pin it for as long as it is mapped here. Says so, and returns False, where CUDA refuses."""
    if shared in _PINNED:
        return True
    memory, cudart = shared.whole, torch.cuda.cudart()
    with torch.cuda.device(device):
        error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if not int(error):
            _PINNED.add(shared)
            weakref.finalize(shared, cudart.cudaHostUnregister, memory.ctypes.data).atexit = False
            return True
        with suppress(RuntimeError):
            torch.ones((), device=device)  # else the next kernel is told of the error
    log_to_stderr(
        f"the {memory.nbytes:,} bytes of the replay cannot be pinned (CUDA error {int(error)}): rows go to {device} by way of copies")
    return False
