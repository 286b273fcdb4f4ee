"""The descriptors of this process: 0, 1 and 2, which every program expects to be open, and how many a run needs."""

import os
import resource
import sys

STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
OF_A_PROCESS = 4  # in main: its end of the pipes of one that it has started
OF_A_START = 12   # more, while one is being started


def open_missing() -> None:
    """Open those of 0, 1 and 2 that are closed on /dev/null, for this process and its children.

    Some schedulers start programs with closed ones. The next file that is opened, or shared memory, would take such a number, and what
    is printed would be written into it.
    """
    for number, (name, mode) in enumerate(STREAMS.items()):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))  # python had found none


def too_few(processes: int) -> str | None:
    """Return a sentence if this process, with all that it has open now, may not open as many more as starting these processes takes."""
    needed = len(os.listdir("/proc/self/fd")) + OF_A_PROCESS * processes + OF_A_START
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return None
    return f"{processes} processes need {needed} open files and {allowed} are allowed: raise the limit by ulimit -n {max(64, 2 * needed)}"
