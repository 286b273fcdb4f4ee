"""Store named numpy arrays in one anonymous shared mapping, the only memory that processes share.

- The mapping is a memfd without a name in the file system: nothing is left when the last process that holds it ends.
- Its pages are allocated at construction, so a shortage is an exception at the start and never a SIGBUS later.
- Spawned children inherit the file descriptor through multiprocessing. Other processes of the same machine and user
  open it in /proc of the process that pickled the object. Nothing is copied.
"""

import errno
import mmap
import os
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import numpy as np

from core.common.system import available_bytes
from core.specs import ArraySpec


def next_multiple(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


ALIGNMENT = 64  # bytes of a cache line, so that counters of different writers never share one


def total_bytes(specs: Mapping[str, ArraySpec]) -> int:
    """Return the number of bytes that `SharedArrays(specs)` allocates."""
    return max(ALIGNMENT, sum(next_multiple(spec.nbytes, ALIGNMENT) for spec in specs.values()))


class SharedFileHandle(NamedTuple):
    """A file that is open in another process. The inode detects a descriptor that was reused for another file."""

    pid: int
    fd: int
    inode: int

    def open(self) -> int:
        """Return a descriptor of the same file. Raises ConnectionError if the process no longer holds the file."""
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConnectionError(
                f"the shared memory of process {self.pid} cannot be reached from here "
                f"({error.strerror}): it ended, or runs as another user or in another container"
            ) from None
        if os.fstat(descriptor).st_ino == self.inode:
            return descriptor
        os.close(descriptor)
        raise ConnectionError(f"process {self.pid} holds the shared memory no longer")


class SharedArrays:
    """A read-only dict of zero-initialised numpy arrays in shared memory.

    A process of the same machine and user that receives this object while the sender lives shares the arrays.

    Raises:
        MemoryError: The machine lacks the bytes, or a limit of this process forbids them. Nothing was allocated.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._specs = dict(specs)
        size = total_bytes(specs)
        if size > available_bytes():
            raise MemoryError(
                f"{size:,} bytes of shared memory are needed and {available_bytes():,} are free: "
                "a smaller memory.capacity, or replay.frame_compression lz4 for pictures, needs less"
            )
        try:
            self._fd = os.memfd_create("shared_arrays")
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            reasons = {
                errno.EFBIG: ": ulimit -f, which counts shared memory too, is lower",
                errno.EMFILE: ": ulimit -n is too low",
            }
            raise MemoryError(
                f"{size:,} bytes of shared memory are needed and cannot be allocated ({error.strerror})"
                f"{reasons.get(error.errno or 0, '')}"
            ) from None
        self._map()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"specs": self._specs, "fd": reduction.DupFd(self._fd)}
        return {"specs": self._specs, "handle": SharedFileHandle(os.getpid(), self._fd, os.fstat(self._fd).st_ino)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._specs = state["specs"]
        self._fd = state["handle"].open() if "handle" in state else state["fd"].detach()
        self._map()

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None and os is not None:  # `os` is None while the interpreter exits
            os.close(self._fd)

    def _map(self) -> None:
        mapping = mmap.mmap(self._fd, total_bytes(self._specs))
        self.whole = np.frombuffer(mapping, np.uint8)  # the bytes of all arrays
        self._arrays, offset = {}, 0
        for name, spec in self._specs.items():
            count = int(np.prod(spec.shape, dtype=np.int64))
            array = np.frombuffer(mapping, dtype=spec.dtype, count=count, offset=offset)
            self._arrays[name] = array.reshape(spec.shape)
            offset += next_multiple(spec.nbytes, ALIGNMENT)
