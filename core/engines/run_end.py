"""Exit codes of `python main.py`, and the last messages of a run."""

import shlex
import signal

from core.runtime.context import Context
from core.runtime.options import RunOptions

DONE, BAD_OPTIONS, BAD_CHECKPOINT, TRAINING_FAILED = 0, 2, 3, 4
INTERRUPTED = 128  # plus the signal's number: 129, 130, 143


def interrupt_signals() -> list[signal.Signals]:
    """Return the signals at which a run saves and ends. SIGHUP is missing if it is ignored, as it is under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a run that ended with this exception.

    A missing package counts as bad options. Other exceptions may carry an `exit_code`: a damaged checkpoint has 3.
    """
    return BAD_OPTIONS if isinstance(error, ImportError) else getattr(error, "exit_code", TRAINING_FAILED)


def unsaved(context: Context) -> str:
    """Name the processes whose last write failed, because their run is not done. Return "" if there are none."""
    names = [" ".join(map(str, context.roles[process_ind])) for process_ind in context.run_state.failed_writers]
    return f"the last write of {', '.join(names)} failed: not all that this run made is on disk" if names else ""


def resume_command_hint(options: RunOptions) -> str:
    """Return the command that continues the run, if the run has a checkpoint."""
    if any(options.checkpoint_folder.glob("step_*")):
        root = "" if options.root == type(options).root else f" --root {shlex.quote(options.root)}"
        return f"continue this run with: python main.py --config {options.config} --resume {options.signature}{root}"
    learner = options.learner
    times = []
    if learner.checkpoint_steps:
        times.append(f"every {learner.checkpoint_steps:,} agent steps, learner.checkpoint_steps")
    if options.engine != "inline":
        times.append(f"every {learner.checkpoint_period:g} s, learner.checkpoint_period")
    due = "; ".join([*times, "at the end"])
    return f"this run has no checkpoint (one is due {due}) and cannot be continued: start a new one"
