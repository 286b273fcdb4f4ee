"""Name, limit and end operating-system processes, and space out the polls of an idle one."""

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1  # an option of prctl(2)
# Signals of a run's processes: main alone decides when it ends.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Bytes. Activations below this size reuse memory of the heap, where malloc would map and unmap pages for each of them.
REUSED_BYTES = 268_435_456
MALLOC_OPTIONS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}  # and their numbers in mallopt(3)
SAME_REQUEST = 0.5  # seconds in which further signals belong to the same request
SHORTEST_DELAY, LONGEST_DELAY, DELAY_GROWTH = 0.0005, 0.02, 1.25  # seconds, seconds, factor
# Descriptors of main for spawned processes; those of the fork server take half as many.
DESCRIPTORS_PER_PROCESS = 4  # the main process keeps this many pipe ends open per child
DESCRIPTORS_PER_START = 12  # additional descriptors while one child starts


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block IGNORED_SIGNALS while a process starts.

    The process inherits the mask, so Ctrl-C, which reaches every process of a terminal, cannot kill it before it
    ignores signals. This process receives pending signals afterwards.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@cache
def deliver_signals_to_forks() -> None:
    """Deliver to a fork of this process the signals that reach it while it starts, from now on.

    Python discards them where the parent handles them, so a worker that an environment starts and ends at once would
    live on. A handler that the fork must not have has to be replaced by an at-fork hook registered before this call.
    """
    masks = threading.local()

    def block() -> None:
        masks.previous = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.previous)

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore)


def idle_delays() -> Iterator[float]:
    """Yield how many seconds to sleep between polls that find no work: 0.5 ms at first, growing to 20 ms."""
    delay = SHORTEST_DELAY
    while True:
        yield delay
        delay = min(DELAY_GROWTH * delay, LONGEST_DELAY)


def reuse_freed_memory() -> None:
    """Let this process reuse blocks of up to REUSED_BYTES, unless the user has set the variables of MALLOC_OPTIONS."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    for name, option in MALLOC_OPTIONS.items():
        if mallopt is not None and name not in os.environ:
            mallopt(option, REUSED_BYTES)


def set_process_name(name: str) -> None:
    """Set the name that top and /proc/<pid>/comm show for this process, from any of its threads.

    Do nothing if a sandbox forbids it, because nothing depends on the name.
    """
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def die_with_parent(parent: int, signal_number: signal.Signals, exit_code: int) -> None:
    """Ask the kernel to send this process a signal when its parent dies, for whatever reason.

    If the parent has died already, this process exits with `exit_code`.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(exit_code)


class Interrupts:
    """Count the requests to end a run: at the first it saves and ends, at a second it ends at once.

    Signals within SAME_REQUEST seconds of a counted one belong to the same request, because several senders repeat
    themselves: the kernel when a parent with threads dies, `timeout`, and a shell beside a program that forwards.
    """

    def __init__(self) -> None:
        self.requests = self.exit_code = 0  # the exit code is 128 plus the number of the first signal
        self._counted = float("-inf")  # monotonic seconds

    def __bool__(self) -> bool:
        return self.requests > 0

    def add(self, number: int) -> bool:
        """Count a signal, unless it belongs to a counted request. Return whether it was counted."""
        now = time.monotonic()
        if now - self._counted < SAME_REQUEST:
            return False
        self.exit_code, self.requests, self._counted = self.exit_code or 128 + number, self.requests + 1, now
        return True


def kill_descendants() -> None:
    """Kill every process that this process has started, directly or not.

    The resource tracker of multiprocessing is spared because it ends by itself.
    """
    with suppress(psutil.Error, OSError):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()


def open_file_shortage(processes: int) -> str | None:
    """Return an error message if the limit of open files is too low to start this many processes, else None."""
    needed = len(os.listdir("/proc/self/fd")) + DESCRIPTORS_PER_PROCESS * processes + DESCRIPTORS_PER_START
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return None
    return (
        f"{processes} processes need {needed} open files and {allowed} are allowed: "
        f"raise the limit by ulimit -n {max(64, 2 * needed)}"
    )
