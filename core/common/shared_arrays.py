"""Named numpy arrays in one anonymous shared mapping: the only memory that crosses a process border.

The mapping is a memfd: it has no name in the file system, so nothing is left when the last process that holds it dies, however
it dies. Its pages are allocated when it is made, so a shortage is an exception at the start and never a SIGBUS later.
Children receive the file descriptor when they are spawned (multiprocessing's own mechanism); other processes of the same machine and user
open it where the process that pickled it has it. Nothing is copied.
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

ALIGNMENT = 64  # bytes, a cache line: counters of different writers never share one
def total_bytes(specs: Mapping[str, ArraySpec]) -> int:
    """Bytes that SharedArrays(specs) will allocate."""
    return max(ALIGNMENT, sum(_aligned(spec.nbytes) for spec in specs.values()))


class Place(NamedTuple):
    """Where another process has a file open. The inode tells it from one that took its numbers since."""

    pid: int
    fd: int
    inode: int

    def open(self) -> int:
        """A descriptor of the same file. Raises ConnectionError when it is not there."""
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConnectionError(f"the shared memory of process {self.pid} cannot be reached from here ({error.strerror}): it ended, runs "
                                  "as another user, or in another container") from None
        if os.fstat(descriptor).st_ino == self.inode:
            return descriptor
        os.close(descriptor)
        raise ConnectionError(f"process {self.pid} holds the shared memory no longer")


class SharedArrays:
    """A dict of zero-initialised numpy arrays shared by every process of this machine and user that receives this object while the
    sender lives.

    Raises MemoryError, before anything is allocated, when the machine does not have the bytes or a limit of this process forbids them.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._specs = dict(specs)
        size = total_bytes(specs)
        if size > available_bytes():
            raise MemoryError(f"{size:,} bytes of shared memory are needed and {available_bytes():,} are free: a smaller memory.capacity, "
                              "or storage.codec lz4 for pictures, needs less")
        try:
            self._fd = os.memfd_create("shared_arrays")
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            limit = {errno.EFBIG: ": ulimit -f, which counts shared memory too, is lower", errno.EMFILE: ": ulimit -n is too low"}
            raise MemoryError(f"{size:,} bytes of shared memory are needed and cannot be had ({error.strerror})"
                              f"{limit.get(error.errno or 0, '')}") from None
        self._map()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"specs": self._specs, "fd": reduction.DupFd(self._fd)}
        return {"specs": self._specs, "place": Place(os.getpid(), self._fd, os.fstat(self._fd).st_ino)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._specs = state["specs"]
        self._fd = state["place"].open() if "place" in state else state["fd"].detach()
        self._map()

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None and os is not None:
            os.close(self._fd)

    def _map(self) -> None:
        mapping = mmap.mmap(self._fd, total_bytes(self._specs))
        self.whole = np.frombuffer(mapping, np.uint8)  # the bytes of all
        self._arrays, offset = {}, 0
        for name, spec in self._specs.items():
            count = int(np.prod(spec.shape, dtype=np.int64))
            array = np.frombuffer(mapping, dtype=spec.dtype, count=count, offset=offset)
            self._arrays[name] = array.reshape(spec.shape)
            offset += _aligned(spec.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
