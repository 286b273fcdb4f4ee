"""Exit codes of `python main.py`, and which of them an exception means."""

import signal

DONE, BAD_OPTIONS, BAD_CHECKPOINT, TRAINING_FAILED = 0, 2, 3, 4
INTERRUPTED = 128  # plus the signal's number: 129, 130, 143


def interrupting() -> list[signal.Signals]:
    """Return the signals at which a run saves and ends. A hangup is none for who is started by nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def of(error: BaseException) -> int:
    """A missing package is a matter of the set-up; exceptions may carry an `exit_code` of their own (a bad checkpoint: 3)."""
    return BAD_OPTIONS if isinstance(error, ImportError) else getattr(error, "exit_code", TRAINING_FAILED)
