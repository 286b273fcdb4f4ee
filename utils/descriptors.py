"""The descriptors 0, 1 and 2 of this process, which every program expects to be open."""

import os
import sys

STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_missing() -> None:
    """Open those that are closed on /dev/null, for this process and its children.

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
