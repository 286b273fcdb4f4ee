"""Exit codes of a run; those of signals are 128 + the signal's number (`Interrupts.exit_code`)."""

DONE = 0
BAD_OPTIONS = 2
BAD_CHECKPOINT = 3
TRAINING_FAILED = 4
