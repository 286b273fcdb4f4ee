"""What is asked of the device a learner computes on, whatever it is. Lines that only CUDA knows are here and in captured.py."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from core.common.console import notice
from core.common.shared_arrays import SharedArrays, available_bytes

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
    notice(f"the {memory.nbytes:,} bytes of the replay cannot be pinned (CUDA error {int(error)}): rows go to {device} by way of copies")
    return False


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated there."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def use_tf32(enabled: bool) -> None:
    """Whether GPUs may round the factors of float32 products and convolutions to TF32's 10 bits, in this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = enabled


def use_threads(count: int) -> None:
    """Threads of an operator, for this thread; and on its CPU what is too small for a normal float32 is zero from now on.

    A processor takes a hundred times as long for such numbers, and Adam's moments are among them once a unit's gradient stays zero. Threads
    that are started later inherit it; torch.set_flush_denormal(False) ends it.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(count)


def device_random_state(device: torch.device) -> Tensor:
    """Of torch's global generator for that device; empty for the CPU, whose state is kept anyway."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0, dtype=torch.uint8)


def set_device_random_state(device: torch.device, state: Tensor | None) -> None:
    """Continue from device_random_state; of another kind of device, or none, nothing is known."""
    if device.type == "cuda" and state is not None and len(state):
        torch.cuda.set_rng_state(state, device)
