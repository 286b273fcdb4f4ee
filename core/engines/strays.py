"""Ends what environments start (programs, forks, workers of multiprocessing) together with the process whose environment started it.

The local engine starts each process with the variable MARK in its environment. Whatever that process starts inherits the mark, in a
group or session of its own too. The kernel ends a process of a run with main, but not what that process started; so this file is also a
program, the *sweeper*. It waits until main has gone, however main went, and then ends all that has the run's mark.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MARK = "RUN_PROCESS"
LONGEST = 5.0  # seconds that the kernel may take to end processes
PAUSE = 0.05   # seconds between two looks


def end_marked(value: str) -> None:
    """Kill every process whose MARK begins with `value`, until two looks in a row have found none."""
    deadline, looks = time.monotonic() + LONGEST, 0
    while looks < 2 and time.monotonic() < deadline:
        looks += 1
        for pid in _marked(value):
            looks = 0
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


def _marked(value: str) -> Iterator[int]:
    """Yield the processes of this user that have the mark; one that has ended and is not waited for yet has no environment."""
    entry = f"\0{MARK}={value}".encode()
    with suppress(OSError):  # no descriptor to be had: what is left goes at the end
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if entry in b"\0" + file.read():
                    yield int(pid)


class Strays:
    """The marks of one run, and its sweeper."""

    def __init__(self) -> None:
        self._run, self._lives = f"{os.urandom(8).hex()}.", 0
        self._sweeper = subprocess.Popen([sys.executable, "-I", "-S", __file__, self._run], stdin=subprocess.PIPE,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    @contextmanager
    def mark(self) -> Iterator[str]:
        """Mark the process that is started in the block. Yields what `end_marked` finds it and its own by."""
        self._lives += 1
        os.environ[MARK] = value = f"{self._run}{self._lives}."
        try:
            yield value
        finally:
            del os.environ[MARK]

    def close(self) -> None:
        """End all that the run has left."""
        end_marked(self._run)
        self._sweeper.communicate()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
