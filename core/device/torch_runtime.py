"""Torch in one process: host-to-device copies, free memory of a device, threads.

Copies have the same interface on CPU and CUDA.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from core.common.console import log_to_stderr
from core.common.shared_arrays import SharedArrays
from core.common.system import available_bytes

_PINNED: weakref.WeakSet[SharedArrays] = weakref.WeakSet()  # registered with CUDA


def upload(array: np.ndarray | Tensor, target: Tensor) -> None:
    """Copy an array into a tensor of its shape, in the order of the device's work. The array may change afterwards.

    On CUDA, the copy goes through pinned memory, so that Python does not wait. torch's allocator reuses that memory
    once the copy is complete.
    """
    source = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    target.copy_(_staged(source) if target.is_cuda else source, non_blocking=True)


def upload_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy each tensor into one of its shape on another or the same device, as `upload` does."""
    if targets[0].device.type == "cpu":
        torch._foreach_copy_(targets, sources)  # one call from Python, which costs more than copying a small tensor
        return
    for source, target in zip(sources, targets, strict=True):
        upload(source, target)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on the device.

    On a CPU, the tensor shares the array's memory. On CUDA, it is copied as by `upload`, and Python does not wait.
    """
    source = torch.from_numpy(array)
    return source if device.type == "cpu" else _staged(source).to(device, non_blocking=True)


def _staged(source: Tensor) -> Tensor:
    """Return a copy in pinned memory, also of pinned sources, which may change before the device reads them."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)


class Transfers:
    """Copies of shared memory to a device.

    On CUDA, the memory is registered as pinned, so that the device reads it in place, on a stream beside its other
    work. If CUDA refuses that, and on a CPU, each copy is an `upload`.
    """

    def __init__(self, shared: SharedArrays, device: torch.device):
        registered = device.type == "cuda" and _register(shared, device)
        self._stream = torch.cuda.Stream(device) if registered else None
        self._memory = shared.whole
        if self._stream is not None:
            # the current stream may still be filling the targets with zeros
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def together(self, after_work: bool) -> Iterator[Callable[[np.ndarray, Tensor], None]]:
        """Yield a function that copies an array into a tensor of its shape.

        When the context ends, the arrays may change and later work on the device sees all copies.

        Args:
            after_work: True if the copies must wait for all work that the device was given before.
        """
        if self._stream is None:
            yield upload
            return
        if after_work:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield self._copy_in_place
        self._stream.synchronize()

    def _copy_in_place(self, array: np.ndarray, target: Tensor) -> None:
        """Copy an array of the shared memory from where it lies.

        Other arrays, such as decompressed frames, are uploaded: they may be freed before the device has read them.
        """
        if np.may_share_memory(array, self._memory):
            target.copy_(torch.from_numpy(array), non_blocking=True)
        else:
            upload(array, target)


def _register(shared: SharedArrays, device: torch.device) -> bool:
    """Pin shared memory for as long as it is mapped here; if CUDA refuses, log it and return False."""
    if shared in _PINNED:
        return True
    memory, cudart = shared.whole, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if not int(error):
            _PINNED.add(shared)
            weakref.finalize(shared, cudart.cudaHostUnregister, memory.ctypes.data).atexit = False
            return True
        with suppress(RuntimeError):
            torch.ones((), device=device)  # takes the error, which the next kernel would report otherwise
    log_to_stderr(
        f"the {memory.nbytes:,} bytes of the replay cannot be pinned (CUDA error {int(error)}): "
        f"steps go to {device} through copies"
    )
    return False


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def use_threads(count: int) -> None:
    """Set the threads of an operator for this thread, and flush denormal numbers to zero.

    Numbers below float32's normal range take a processor a hundred times as long. Adam's moments get there once a
    unit's gradient stays zero. Threads that are started later inherit the setting. torch.set_flush_denormal(False) ends
    it.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(count)
