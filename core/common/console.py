"""What a running process tells the person who started it, beside the progress line."""

import sys
from contextlib import suppress


def log_to_stderr(message: str) -> None:
    """Print to stderr. One that is closed, or redirected to a full disk, is no reason to stop a run."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
