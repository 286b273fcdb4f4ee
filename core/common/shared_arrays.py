"""Store named numpy arrays in one anonymous shared mapping, the only memory that processes share.

- The mapping is a memfd without a name in the file system: nothing is left when the last process that holds it ends.
- Its pages are allocated at construction, so a shortage is an exception at the start and never a SIGBUS later.
- Spawned children inherit the file descriptor through multiprocessing. Other processes of the same machine and user
  open it in /proc of the process that pickled the object. Nothing is copied.
"""

import errno
import mmap
import os
import weakref
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from core.common.system import available_bytes
from core.specs import ArraySpec


def next_multiple(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


ALIGNMENT = 64  # bytes of a cache line, so that counters of different writers never share one
CACHE_LINE = ALIGNMENT // 8  # int64 values


def total_bytes(specs: Mapping[str, ArraySpec]) -> int:
    """Return the number of bytes that `SharedArrays(specs)` allocates."""
    return max(ALIGNMENT, sum(next_multiple(spec.nbytes, ALIGNMENT) for spec in specs.values()))


class SharedArrays(dict[str, np.ndarray]):
    """Zero-initialised numpy arrays in shared memory, by name.

    A process of the same machine and user that receives this object while the sender lives shares the arrays.

    Args:
        specs: Shape and dtype of each array.
        descriptor: Mapping that another process has made; None makes one.

    Raises:
        MemoryError: The machine lacks the bytes, or a limit of this process forbids them. Nothing was allocated.
    """

    # Two objects are equal if they are one: a weak set holds them, and arrays have no single truth value.
    __eq__, __hash__ = object.__eq__, object.__hash__  # type: ignore[assignment]

    def __init__(self, specs: Mapping[str, ArraySpec], descriptor: int | None = None):
        self._specs, size, offset = dict(specs), total_bytes(specs), 0
        self._fd = _allocate(size) if descriptor is None else descriptor
        weakref.finalize(self, os.close, self._fd)
        mapping = mmap.mmap(self._fd, size)
        self.whole = np.frombuffer(mapping, np.uint8)  # the bytes of all arrays
        for name, spec in specs.items():
            array = np.frombuffer(mapping, spec.dtype, int(np.prod(spec.shape, dtype=np.int64)), offset)
            self[name] = array.reshape(spec.shape)
            offset += next_multiple(spec.nbytes, ALIGNMENT)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _inherit, (self._specs, reduction.DupFd(self._fd))
        # The inode detects a descriptor that was reused for another file.
        return _open, (self._specs, os.getpid(), self._fd, os.fstat(self._fd).st_ino)


def _allocate(size: int) -> int:
    """Return the descriptor of a new anonymous file of this many bytes."""
    if size > available_bytes():
        raise MemoryError(
            f"{size:,} bytes of shared memory are needed and {available_bytes():,} are free: "
            "a smaller memory.capacity, or replay.frame_compression lz4 for pictures, needs less"
        )
    descriptor = None
    try:
        descriptor = os.memfd_create("shared_arrays")
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        reasons = {
            errno.EFBIG: ": ulimit -f, which counts shared memory too, is lower",
            errno.EMFILE: ": ulimit -n is too low",
        }
        raise MemoryError(
            f"{size:,} bytes of shared memory are needed and cannot be allocated ({error.strerror})"
            f"{reasons.get(error.errno or 0, '')}"
        ) from None
    return descriptor


def _inherit(specs: Mapping[str, ArraySpec], descriptor: Any) -> SharedArrays:
    """Return the arrays of a descriptor that this process has inherited."""
    return SharedArrays(specs, descriptor.detach())


def _open(specs: Mapping[str, ArraySpec], pid: int, descriptor: int, inode: int) -> SharedArrays:
    """Return the arrays that another process has open. Raises ConnectionError if it no longer has."""
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConnectionError(
            f"the shared memory of process {pid} cannot be reached from here "
            f"({error.strerror}): it ended, or runs as another user or in another container"
        ) from None
    if os.fstat(own).st_ino == inode:
        return SharedArrays(specs, own)
    os.close(own)
    raise ConnectionError(f"process {pid} holds the shared memory no longer")
