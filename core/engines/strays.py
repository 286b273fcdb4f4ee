"""Ends what environments start (programs, forks, workers of multiprocessing) together with their process.

The local engine starts each process with the environment variable MARK. Programs that the process starts inherit it,
even in a process group or session of their own. Its forks inherit a mapped file of that name (`mark_forks`): the kernel
shows the variables with which a program began, and a process of the fork server is a fork of main.

The kernel ends a process of a run together with main, but not what that process started. Therefore this file is also a
program, the *sweeper*: it waits for the end of main, however main ends, and then ends every process that has the run's
mark.
"""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MARK = "RUN_PROCESS"
TIMEOUT = 5.0  # seconds that the kernel may take to end processes
PERIOD = 0.05  # seconds between two searches


_mapped: list[mmap.mmap] = []  # as long as the process lives


def mark_forks() -> None:
    """Map an empty file whose name is this process's mark into its memory, and thereby into that of its forks."""
    if mark := os.environ.get(MARK):
        descriptor = os.memfd_create(f"{MARK}={mark}")
        os.ftruncate(descriptor, 1)
        _mapped.append(mmap.mmap(descriptor, 1))
        os.close(descriptor)


def end_marked(value: str) -> None:
    """Kill every process whose MARK begins with `value`, until two searches in a row have found none."""
    deadline, empty_searches = time.monotonic() + TIMEOUT, 0
    while empty_searches < 2 and time.monotonic() < deadline:
        empty_searches += 1
        for pid in _marked(value):
            empty_searches = 0
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PERIOD)


def _marked(value: str) -> Iterator[int]:
    """Yield this user's processes that have the mark, which zombies have not."""
    entry = f"{MARK}={value}".encode()
    with suppress(OSError):  # no descriptor to be had: `Strays.close` ends what is left
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with (
                suppress(OSError),
                open(f"/proc/{pid}/environ", "rb") as variables,
                open(f"/proc/{pid}/maps", "rb") as maps,
            ):
                if b"\0" + entry in b"\0" + variables.read() or b"/memfd:" + entry in maps.read():
                    yield int(pid)


class Strays:
    """The marks of one run, and its sweeper."""

    def __init__(self) -> None:
        self._run, self._count = f"{os.urandom(8).hex()}.", 0
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._run],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @contextmanager
    def mark(self) -> Iterator[str]:
        """Mark the process that is started in this context. Yields the value by which `end_marked` finds children."""
        self._count += 1
        os.environ[MARK] = value = f"{self._run}{self._count}."
        try:
            yield value
        finally:
            del os.environ[MARK]

    def close(self) -> None:
        """End everything that the run has left."""
        end_marked(self._run)
        self._sweeper.communicate()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
