"""Open missing standard streams, and print messages beside the progress line."""

import os
import sys
from contextlib import suppress

STREAM_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of descriptors 0, 1 and 2


def open_missing_streams() -> None:
    """Open each of the descriptors 0, 1 and 2 that is closed on /dev/null, for this process and its children.

    Some schedulers start programs with closed standard streams. The next open file or shared memory would then get such
    a descriptor, and printed text would be written into it.
    """
    for descriptor, (name, mode) in enumerate(STREAM_MODES.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))  # Python set the stream to None


def log_to_stderr(message: str) -> None:
    """Print a line to standard error. A closed stream or a full disk is ignored, so that no message stops a run."""
    with suppress(OSError, ValueError):  # ValueError for a closed stream
        print(message, file=sys.stderr, flush=True)
